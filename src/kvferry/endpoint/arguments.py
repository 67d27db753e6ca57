"""Arguments of an engine's calls, checked before anything happens.

They are checked on the caller's thread: what is wrong must be said there, and must not come to
the owner's, where it would concern every room.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import index
from time import monotonic
from typing import Any

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.plan.plan import MAX_TOKENS


def deadline_in(seconds: float) -> float:
    """When a room that may take so long has to be over. One in the past is over at once."""
    if isinstance(seconds, int | float) and -inf < seconds < inf:
        return monotonic() + seconds
    raise InputError(f"deadline_s is a finite number of seconds, not {seconds!r:.200}")


def token_count(number: int, what: str = "tokens") -> int:
    """A Python integer, whatever the engine counts with."""
    try:
        count = index(number)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_TOKENS:
        raise InputError(f"{what} is a whole number from 0 to {MAX_TOKENS}, not {number!r:.200}")
    return count


def span_of(ends: tuple[int, int], what: str, most: int = MAX_TOKENS) -> Span:
    """What lies between two whole numbers."""
    try:
        first, end = map(index, ends)
    except (TypeError, ValueError):
        first, end = 0, 0
    if not 0 <= first < end <= most:
        raise InputError(
            f"{what} are (first, end) with 0 <= first < end <= {most}, not {ends!r:.200}"
        )
    return Span(first, end)


def bytes_of(data: bytes, what: str) -> bytes:
    """As they travel; not a text, whose bytes only its owner knows."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise InputError(f"{what} is bytes, not {type(data).__name__}; encode it")


def demand_waitable(after: Any) -> None:
    """Raises ``InputError`` for what can't be asked whether it has happened."""
    query: Callable[[], bool] | None = getattr(after, "query", None)
    if after is not None and not callable(query):
        raise InputError(
            f"after is an event with query(), such as a torch.cuda.Event, not {after!r:.200}"
        )
