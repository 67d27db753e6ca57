"""A room at its source, as the engine sees it. Checks what it is told before anything happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvferry.digest import checked_digest
from kvferry.errors import InputError, Misuse
from kvferry.ids import Room, Session
from kvferry.layout.intervals import Span, SpanSet
from kvferry.plan.bind import Side
from kvferry.plan.choose import Path
from kvferry.protocol.events import Event, Finish, Prepare, Push
from kvferry.protocol.messages import MAX_METADATA
from kvferry.runtime.handles import Handle
from kvferry.runtime.tables import GrowingTables, Pages, Reach, Rows, Shelf


class Waitable(Protocol):
    """Something that a push may wait for, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has happened."""


class Step(Protocol):
    """What a handle asks its owner for."""

    def __call__(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        """After what was asked before and after ``after``: learn, then take the step."""


class Outgoing(Handle):
    """One room, for one thread at a time. Chunks are pushed in the order of their tokens."""

    def __init__(
        self,
        room: Room,
        deadline: float,
        shelf: Shelf,
        step: Step,
        abort: Callable[[Outgoing], None],
    ) -> None:
        super().__init__(room, deadline)
        self._shelf = shelf
        self._step = step
        self._abort = abort
        self._pushed = SpanSet()
        self._reach = Reach()
        self._closed = False
        # Bytes that were written for the room by each path; complete when it is released.
        self.carried: dict[Path, int] = {}
        # The owner's, from here on.
        self.tables = GrowingTables()
        self.steps: deque[tuple[Waitable | None, Callable[[], None], Event]] = deque()
        self.sides: dict[tuple[Session, int], Side] = {}

    def prepare(self, tokens: tuple[int, int], pages: Pages) -> None:
        """These tokens are about to be computed into these pages: ask for credits now."""
        span = self._span(tokens, "prepare")
        chunk = self._shelf.chunk(span, pages)
        self._reach.extend(chunk)
        self._step(self, None, lambda: self.tables.add(chunk), Prepare(self.room, span))

    def push(self, tokens: tuple[int, int], pages: Pages, after: Waitable | None = None) -> None:
        """These tokens are in these pages, now or when ``after`` has happened.

        ``pages`` are the ones that the tokens touch, in the order of the tokens.
        """
        span = self._span(tokens, "push")
        if self._pushed.overlaps(span):
            raise Misuse(f"room {self.room!r} has had some of the tokens {span} pushed")
        chunk = self._shelf.chunk(span, pages)
        self._reach.extend(chunk)
        self._pushed.add(span)
        self._step(self, after, lambda: self.tables.add(chunk), Push(self.room, span))

    def close(
        self,
        metadata: bytes = b"",
        *,
        states: Rows | None = None,
        tokens: int | None = None,
        after: Waitable | None = None,
        digest: bytes = b"",
    ) -> None:
        """Everything was pushed. ``tokens`` is the request's length if the last were not pushed.

        ``digest`` says what was computed (``kvferry.digest_of``); every rank gives the same. A
        target that was given another, or none, fails the room and uses nothing of it.
        """
        self._demand_open("close")
        if len(metadata) > MAX_METADATA:
            raise InputError(f"metadata has at most {MAX_METADATA} bytes, not {len(metadata)}")
        rows = self._shelf.rows(states)
        end = self._pushed.spans[-1].end if self._pushed.spans else 0
        num_tokens = end if tokens is None else tokens
        finish = Finish(self.room, num_tokens, metadata, checked_digest(digest))
        self._closed = True
        self._step(self, after, lambda: self.tables.add_rows(rows), finish)

    def abort(self) -> None:
        """Give the room up. Its pages stay held until ``released``."""
        self._abort(self)

    def _span(self, tokens: tuple[int, int], what: str) -> Span:
        self._demand_open(what)
        first, end = tokens
        if not 0 <= first < end:
            raise InputError(f"tokens are (first, end) with 0 <= first < end, not {tokens}")
        return Span(first, end)

    def _demand_open(self, what: str) -> None:
        if self._closed:
            raise Misuse(f"room {self.room!r} was closed; it can't {what}")
