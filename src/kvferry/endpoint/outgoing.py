"""Handle of a room at its source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from kvferry.endpoint.arguments import bytes_of, check_event, span_of, token_count
from kvferry.endpoint.handles import Handle
from kvferry.errors import InputError, Misuse
from kvferry.ids import Room
from kvferry.layout.intervals import Span
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
from kvferry.protocol.outbound import PushedSpans


class Waitable(Protocol):
    """An event that a push can wait for, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the event has happened. Called on the loop thread; must not wait."""


class PendingStep(NamedTuple):
    """An engine's request for a room, with the pages that the loop thread adds before it."""

    event: Event
    after: Waitable | None = None
    chunk: Chunk | None = None
    rows: dict[str, int] | None = None


class Outgoing(Handle):
    """One room at one prefill rank: a transfer out of this rank's pages.

    ``SourceEndpoint.open`` makes it. The engine pushes each token of each layer once, in any
    order, and then calls ``close``. Only one thread at a time may use it. See ``Handle`` for how
    to learn of its end. Methods return at once; they raise ``InputError`` for a wrong argument
    and ``Misuse`` for a call out of order, and then have no effect.
    """

    def __init__(
        self,
        room: Room,
        deadline: float,
        validator: PageTableValidator,
        submit: Callable[[Outgoing, PendingStep], None],
        abort: Callable[[Outgoing], None],
    ) -> None:
        super().__init__(room, deadline, abort)
        self._validator = validator
        self._submit = submit
        self._all_layers = Span(0, validator.num_layers)
        self._pushed = PushedSpans()
        self._reach = PageHistory()
        self._rows: dict[str, int] = {}
        self._state_ends: set[int] = set()
        self._closed = False
        # Bytes written for the room by mode, and number of writes; final once it is released.
        self.carried: dict[TransferMode, int] = {}
        self.num_writes = 0
        # For the loop thread: the room's pages, and steps that wait for their GPU event.
        self.tables = PageTableBuilder()
        self.steps: deque[PendingStep] = deque()

    @property
    def page_counts(self) -> Mapping[str, int]:
        """Number of pages held for the room, by group."""
        return self.tables.page_counts

    def prepare(self, tokens: tuple[int, int], pages: Pages) -> None:
        """Announce that the tokens ``(first, end)`` will be computed into these pages.

        Optional. The endpoint binds the pages and asks the target for staging credits while the
        engine computes.
        """
        self._check_open("prepare")
        span = span_of(tokens, "tokens")
        chunk = self._validator.chunk(span, pages, known=self._reach.latest)
        self._reach.extend(chunk)
        self._submit(self, PendingStep(Prepare(self.room, span), None, chunk))

    def push(
        self,
        tokens: tuple[int, int],
        pages: Pages,
        after: Waitable | None = None,
        layers: tuple[int, int] | None = None,
        states: Rows | None = None,
    ) -> None:
        """Send the tokens ``(first, end)`` of the given layers.

        ``pages``: the pages that the tokens touch, in token order.
        ``after``: the bytes are in the pages once this event has happened; None if they are now.
        ``layers``: ``(first, end)``, numbered over the whole model; None for all.
        ``states``: also send the state rows of these layers. The tokens must then be the
        request's last.
        """
        self._check_open("push")
        span = span_of(tokens, "tokens")
        check_event(after)
        some = None if layers is None else span_of(layers, "layers", self._all_layers.end)
        chunk = self._validator.chunk(span, pages, some, self._reach.latest)
        rows = {} if states is None else self._validator.rows(states, some, self._rows)
        event = Push(self.room, span, some, bool(rows))
        self._pushed.check(event, some or self._all_layers)
        self._reach.extend(chunk)
        self._pushed.add(event, some or self._all_layers)
        if rows:
            self._rows |= rows
            self._state_ends.add(span.end)
        self._submit(self, PendingStep(event, after, chunk, rows))

    def close(
        self,
        metadata: bytes = b"",
        *,
        states: Rows | None = None,
        tokens: int | None = None,
        after: Waitable | None = None,
        digest: bytes = b"",
    ) -> None:
        """Declare that everything was pushed.

        ``metadata``: bytes for the target's engine, such as the first token. The lead source's
        metadata becomes ``Incoming.metadata``.
        ``states``: state rows that no push sent.
        ``tokens``: the request's length, if its last tokens were not pushed (a cached prefix of
        the target may cover them).
        ``after``: the state rows are in memory once this event has happened.
        ``digest``: what was computed (``kvferry.digest_of``), the same at every rank. A target
        that was given another digest, or none, fails the room and uses none of its bytes.
        """
        self._check_open("close")
        check_event(after)
        data = bytes_of(metadata, "metadata")
        rows = self._validator.rows(states, known=self._rows)
        num_tokens = self._pushed.tokens.end if tokens is None else token_count(tokens)
        if self._state_ends - {num_tokens}:
            raise InputError(
                f"state rows were pushed with tokens up to {min(self._state_ends)} of "
                f"{num_tokens}; push them with the last tokens, or pass them to close()"
            )
        finish = Finish(self.room, num_tokens, data, digest)
        self._closed = True
        self._submit(self, PendingStep(finish, after, None, rows))

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise Misuse(f"room {self.room!r} is closed; {call}() must come before close()")
