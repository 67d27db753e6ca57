"""A room at its source, as the engine sees it. Checks what it is told before anything happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvferry.digest import checked_digest
from kvferry.endpoint.arguments import bytes_of, demand_waitable, span_of, token_count
from kvferry.endpoint.handles import Handle
from kvferry.errors import InputError, Misuse
from kvferry.ids import Room
from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span, SpanSet
from kvferry.memory.page_tables import (
    Chunk,
    PageHistory,
    Pages,
    PageTableBuilder,
    PageTableValidator,
    Rows,
)
from kvferry.plan.choose import TransferMode
from kvferry.protocol.events import Event, Finish, Prepare, Push
from kvferry.protocol.messages import MAX_METADATA


class Waitable(Protocol):
    """Something that a push may wait for, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has happened."""


class RoomStep(Protocol):
    """What a handle asks its owner for."""

    def __call__(
        self, handle: Outgoing, after: Waitable | None, learn: Callable[[], None], event: Event
    ) -> None:
        """After what was asked before and after ``after``: learn, then take the step."""


class Outgoing(Handle):
    """One room, for one thread at a time. Each token of each layer is pushed once, in any order."""

    def __init__(
        self,
        room: Room,
        deadline: float,
        validator: PageTableValidator,
        step: RoomStep,
        abort: Callable[[Outgoing], None],
    ) -> None:
        super().__init__(room, deadline)
        self._validator = validator
        self._step = step
        self._abort = abort
        self._all = Span(0, validator.num_layers)
        self._pushed = Coverage()
        self._reach = PageHistory()
        self._rows: dict[str, int] = {}
        self._states = SpanSet()
        self._state_ends: set[int] = set()
        self._closed = False
        # What was written for the room, and in how many writes; complete when it is released.
        self.carried: dict[TransferMode, int] = {}
        self.num_writes = 0
        # The owner's, from here on.
        self.tables = PageTableBuilder()
        self.steps: deque[tuple[Waitable | None, Callable[[], None], Event]] = deque()

    @property
    def num_pages(self) -> int:
        """Pages that are held for the room, of the group that has most."""
        return self.tables.num_pages

    def prepare(self, tokens: tuple[int, int], pages: Pages) -> None:
        """These tokens are about to be computed into these pages: ask for credits now."""
        span = self._span(tokens, "prepare")
        chunk = self._validator.chunk(span, pages, known=self._reach.latest)
        self._reach.extend(chunk)
        self._step(self, None, lambda: self.tables.add(chunk), Prepare(self.room, span))

    def push(
        self,
        tokens: tuple[int, int],
        pages: Pages,
        after: Waitable | None = None,
        layers: tuple[int, int] | None = None,
        states: Rows | None = None,
    ) -> None:
        """These tokens of these layers are in these pages, now or when ``after`` has happened.

        ``pages`` are the ones that the tokens touch, in the order of the tokens. ``layers`` are
        numbered over the whole model; without them it is all. With ``states``, the state rows of
        these layers go too: then the tokens are the request's last.
        """
        span = self._span(tokens, "push")
        demand_waitable(after)
        some = None if layers is None else span_of(layers, "layers", self._all.end)
        chunk = self._validator.chunk(span, pages, some, self._reach.latest)
        rows = {} if states is None else self._validator.rows(states, some, self._rows)
        self._demand_new(span, some or self._all, bool(rows))
        self._reach.extend(chunk)
        self._pushed.add(some or self._all, span)
        if rows:
            self._rows |= rows
            self._states.add(some or self._all)
            self._state_ends.add(span.end)
        learn = partial(self._learn, chunk, rows)
        self._step(self, after, learn, Push(self.room, span, some, bool(rows)))

    def _learn(self, chunk: Chunk, rows: dict[str, int]) -> None:
        """On the owner's thread, when the step is taken."""
        self.tables.add(chunk)
        self.tables.add_rows(rows)

    def _demand_new(self, tokens: Span, layers: Span, states: bool) -> None:
        if self._pushed.overlaps(layers, tokens):
            which = f"the tokens {tokens} of layers {layers}"
            raise Misuse(f"room {self.room!r} has had some of {which} pushed; push each once")
        if states and self._states.overlaps(layers):
            raise Misuse(f"room {self.room!r} has had state rows of layers {layers} pushed")

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
        demand_waitable(after)
        data = bytes_of(metadata, "metadata")
        if len(data) > MAX_METADATA:
            raise InputError(f"metadata has at most {MAX_METADATA} bytes, not {len(data)}")
        rows = self._validator.rows(states, known=self._rows)
        num_tokens = self._pushed.end if tokens is None else token_count(tokens)
        if self._state_ends - {num_tokens}:
            early = f"tokens up to {min(self._state_ends)} of {num_tokens}"
            raise InputError(
                f"state rows were pushed with {early}; push them with the last tokens, or give "
                f"them at the close"
            )
        finish = Finish(self.room, num_tokens, data, checked_digest(digest))
        self._closed = True
        self._step(self, after, lambda: self.tables.add_rows(rows), finish)

    def abort(self) -> None:
        """Give the room up. Its pages stay held until ``released``."""
        self._abort(self)

    def _span(self, tokens: tuple[int, int], what: str) -> Span:
        self._demand_open(what)
        return span_of(tokens, "tokens")

    def _demand_open(self, what: str) -> None:
        if self._closed:
            raise Misuse(f"room {self.room!r} was closed; it can't {what}")
