"""Handles: what an engine keeps of a room. Written by the owner, read by anyone.

Reading ``status`` costs an attribute, so a scheduler may look at thousands in
each of its turns. Callbacks run on the owner's thread and must not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from math import inf
from time import monotonic
from typing import Any, Literal

from kvferry.endpoint.one_time_result import OneTimeResult
from kvferry.ids import Room
from kvferry.protocol.outcome import Done, Failure, Outcome, Status
from kvferry.telemetry.tags import NO_TAG


class Handle:
    """One room of one rank: where it stands, how it ended, whether its memory is free."""

    def __init__(self, room: Room, deadline: float = inf) -> None:
        self.room = room
        self.deadline = deadline
        self.status = Status.CONNECTING
        self.begun = monotonic()
        # When a source's engine had pushed everything.
        self.finished: float | None = None
        # Whose room it is, where its engine says so.
        self.tag = NO_TAG
        self._outcome: OneTimeResult[Outcome] = OneTimeResult()
        self._released: OneTimeResult[Literal[True]] = OneTimeResult()

    @property
    def num_pages(self) -> int:
        """Pages that are held for the room, of the group that has most."""
        return 0

    # ------------------------------------------------------------ for the engine

    @property
    def outcome(self) -> Outcome | None:
        """Done or the failure; None while the room goes on."""
        return self._outcome.value

    @property
    def failure(self) -> Failure | None:
        """Why the room failed; None if it did not."""
        outcome = self.outcome
        return outcome if isinstance(outcome, Failure) else None

    @property
    def released(self) -> bool:
        """Whether the room's pages are the engine's again."""
        return self._released.value is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the end. Raises ``TimeoutError``; the room's own deadline is no error."""
        return self._outcome.wait(timeout_s)

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Wait until the pages may be reused. Raises ``TimeoutError``."""
        self._released.wait(timeout_s)

    def on_end(self, callback: Callable[[Outcome], None]) -> None:
        """Call this with the outcome, at once if the room has ended."""
        self._outcome.then(callback)

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call this when the pages may be reused, at once if they may."""
        self._released.then(lambda _: callback())

    def __await__(self) -> Generator[Any, None, Outcome]:
        """The outcome. A task that is cancelled while it waits leaves the room as it is."""
        future: Future[Outcome] = Future()
        self._outcome.then(future.set_result)
        return asyncio.shield(asyncio.wrap_future(future)).__await__()

    # ------------------------------------------------------------ for the owner

    def end(self, outcome: Outcome) -> None:
        """The room has ended. Whoever says so first is right: an owner or, if it hangs, another."""
        if self._outcome.value is None:
            self.status = Status.DONE if isinstance(outcome, Done) else Status.FAILED
            self._outcome.set(outcome)

    def release(self) -> None:
        """The room's memory is free."""
        self._released.set(True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.room!r} {self.status.name.lower()}>"
