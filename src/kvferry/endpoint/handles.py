"""Base class of the handles that an engine keeps for its rooms.

The loop thread updates a handle; any thread may read it. Reading ``status`` costs one attribute
access, so a scheduler can poll thousands of handles in each of its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from math import inf
from time import monotonic
from typing import Any, Literal

from kvferry.endpoint.one_time_result import OneTimeResult
from kvferry.ids import Room
from kvferry.plan.plan import Block
from kvferry.protocol.outcome import Done, Failure, Outcome, Status
from kvferry.telemetry.steps import NO_TAG


class Handle:
    """State of one room at one rank: its status, its outcome, and whether its memory is free."""

    def __init__(
        self, room: Room, deadline: float = inf, abort: Callable[[Any], None] = lambda _: None
    ) -> None:
        self.room = room
        self.deadline = deadline
        self.status = Status.CONNECTING
        self.begun = monotonic()
        # Source only: when the engine closed the room. Observers read it.
        self.finished: float | None = None
        # Target only: blocks of a failed room that the engine must not use; None for all.
        self.unusable: tuple[Block, ...] | None = None
        # The engine's request, for logs and traces.
        self.tag = NO_TAG
        # Tokens whose pages are held for the room. Only the loop thread changes it.
        self.held_tokens = 0
        self._abort = abort
        self._outcome: OneTimeResult[Outcome] = OneTimeResult()
        self._released: OneTimeResult[Literal[True]] = OneTimeResult()

    @property
    def page_counts(self) -> Mapping[str, int]:
        """Number of pages held for the room, by group."""
        return {}

    @property
    def num_pages(self) -> int:
        """Number of pages held for the room, in the group that has the most."""
        return max(self.page_counts.values(), default=0)

    # ------------------------------------------------------------ for the engine

    @property
    def outcome(self) -> Outcome | None:
        """``Done`` or a ``Failure``; None while the transfer runs."""
        return self._outcome.value

    @property
    def failure(self) -> Failure | None:
        """The failure; None if the room is done or still running."""
        outcome = self.outcome
        return outcome if isinstance(outcome, Failure) else None

    @property
    def released(self) -> bool:
        """Whether the engine may reuse the room's pages."""
        return self._released.value is not None

    def abort(self) -> None:
        """Fail the room with code ``aborted``. Its pages stay held until ``released``."""
        self._abort(self)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome and return it. Raises ``TimeoutError`` after ``timeout_s`` seconds.

        A room that misses its own deadline does not raise; its outcome is a ``Failure``.
        """
        return self._outcome.wait(timeout_s)

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Wait until the pages may be reused. Raises ``TimeoutError`` after ``timeout_s`` s."""
        self._released.wait(timeout_s)

    def on_end(self, callback: Callable[[Outcome], None]) -> None:
        """Call ``callback`` with the outcome: on the loop thread, or at once if there is one.

        The callback must not wait. An exception that it raises is logged.
        """
        self._outcome.add_callback(callback)

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the pages may be reused, with the same rules as ``on_end``."""
        self._released.add_callback(lambda _: callback())

    def __await__(self) -> Generator[Any, None, Outcome]:
        """Await the outcome. Cancelling the awaiting task does not affect the room."""
        future: Future[Outcome] = Future()
        self._outcome.add_callback(future.set_result)
        return asyncio.shield(asyncio.wrap_future(future)).__await__()

    # ------------------------------------------------------------ for the loop

    def end(self, outcome: Outcome) -> None:
        """Set the outcome. The first call wins: the watchdog calls it too when the loop hangs."""
        if self._outcome.value is None:
            self.status = Status.DONE if isinstance(outcome, Done) else Status.FAILED
            self._outcome.set(outcome)

    def release(self) -> None:
        """Mark the room's memory as free."""
        self._released.set(True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.room!r} {self.status.name.lower()}>"
