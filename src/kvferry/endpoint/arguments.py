"""Validation of the arguments that an engine passes to endpoints and handles.

Arguments are checked on the caller's thread, so that the caller gets the exception. An invalid
argument that reached the loop thread would stop every room.
"""

from __future__ import annotations

from math import inf
from operator import index
from time import monotonic
from typing import Any

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.plan.plan import MAX_TOKENS


def deadline_in(seconds: float) -> float:
    """Return the monotonic time ``seconds`` from now. A negative number gives a past deadline."""
    if isinstance(seconds, int | float) and -inf < seconds < inf:
        return monotonic() + seconds
    raise InputError(f"deadline_s must be a finite number of seconds, not {seconds!r:.200}")


def token_count(number: int, what: str = "tokens") -> int:
    """Return the count as a Python integer. Accepts other integer types, such as NumPy's."""
    try:
        count = index(number)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_TOKENS:
        raise InputError(f"{what} must be an integer from 0 to {MAX_TOKENS}, not {number!r:.200}")
    return count


def span_of(ends: tuple[int, int], what: str, maximum: int = MAX_TOKENS) -> Span:
    """Return the half-open interval ``(first, end)`` as a Span."""
    try:
        first, end = map(index, ends)
    except (TypeError, ValueError):
        first, end = 0, 0
    if not 0 <= first < end <= maximum:
        raise InputError(
            f"{what} must be (first, end) with 0 <= first < end <= {maximum}, not {ends!r:.200}"
        )
    return Span(first, end)


def bytes_of(data: bytes, what: str) -> bytes:
    """Return a bytes-like object as bytes."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise InputError(f"{what} must be bytes, not {type(data).__name__}; encode it")


def check_event(after: Any) -> None:
    """Raise ``InputError`` unless ``after`` is None or has a ``query`` method."""
    if after is not None and not callable(getattr(after, "query", None)):
        raise InputError(
            f"after must be an event with query(), such as a torch.cuda.Event, not {after!r:.200}"
        )
