"""Interface between an endpoint's loop and its observers.

The loop knows only ``Observer``. Metrics, traces and spans implement it, and so may an
application. Events carry objects that exist anyway, so an unobserved event costs one call of an
empty method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.plan.choose import TransferMode
from kvferry.protocol.events import Gather, Write, WriteFate
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Outcome, Status
from kvferry.telemetry.steps import RoomTag, StepKind


class ObservedRoom(Protocol):
    """Fields of a room's handle that observers may read."""

    room: Room
    tag: RoomTag
    status: Status
    begun: float
    # When a source's engine pushed its last chunk.
    finished: float | None
    held_tokens: int

    @property
    def num_pages(self) -> int:
        """Pages held for the room."""


class ObservedWrite(Protocol):
    """Fields of an ended write that observers may read. ``fate`` is None for success."""

    action: Write | Gather
    fate: WriteFate | None
    mode: TransferMode
    num_bytes: int
    num_pieces: int
    seconds: float
    transport: str


class WaitReason(StrEnum):
    """The event that an open room waits for."""

    INSTANCE = "instance"  # discovery lists no complete prefill instance of that name
    LINK = "link"  # a handshake with the prefill instance
    OFFER = "offer"  # at a source: no target has named its pages
    PUSH = "push"  # the prefill engine has pushed nothing yet
    CREDIT = "credit"  # at a source: a chunk waits for a staging slot of its target
    WRITES = "writes"  # more chunks, or writes in flight
    RELEASE = "release"  # a failed room, until its writes have ended or its peers have confirmed
    QUARANTINE = "quarantine"  # a failed room, until its lost peer is proven gone


class RoomUsage(NamedTuple):
    """One open room and the memory that it pins at this rank."""

    age_s: float
    reason: WaitReason
    num_pages: int
    num_tokens: int
    num_bytes: int


class LoopStatus(NamedTuple):
    """State of a loop at a time. Read the machine's ``links`` and ``counts`` in ``status`` only.

    ``num_credits``: staging credits that were granted and not used.
    """

    at: float
    num_open: int
    num_quarantined: int
    staging_used_bytes: int
    staging_bytes: int
    links: Collection[Link]
    counts: Mapping[str, int]
    num_credits: int = 0
    rooms: Collection[RoomUsage] = ()


class Observer:
    """Receives the events of one endpoint. This class ignores them all: the null default.

    Override the methods you need. They run on the loop thread, except ``thread_stalled``. An
    observer must not wait, must not raise, and must not change or keep its arguments, because
    the loop reuses handles and tables. Times are those of ``time.monotonic``.
    """

    def room_opened(self, room: ObservedRoom) -> None:
        """Called when the engine opens a room (source) or asks for one (target)."""

    def step(self, room: Room, kind: StepKind, tokens: Span | None = None) -> None:
        """Called for steps without a frame: ``PUSHED`` tokens, and ``RELEASED`` memory."""

    def frame_in(self, envelope: Envelope) -> None:
        """Called for each valid frame, before the machine handles it."""

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        """Called for each frame that is queued for a peer; it is sent in the same turn."""

    def write(self, job: ObservedWrite, at: float) -> None:
        """Called when a write to a peer has ended, successfully or not."""

    def copy(
        self, room: Room, peer: Peer, kind: StepKind, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Called when a copy out of pages (``GATHERED``) or into them (``SCATTERED``) has ended."""

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Called when a room is done or has failed, just before its engine is told."""

    def link_up(self, peer: Peer, transport: str) -> None:
        """Called when one side can reach the other's memory by that transport."""

    def refused(self, what: str, times: int = 1) -> None:
        """Called when a frame, a connection or anything else is rejected; ``what`` says why."""

    def status(self, status: LoopStatus) -> None:
        """Called a few times a second while the endpoint has rooms or links."""

    def thread_stalled(self, thread: str, silent_s: float) -> None:
        """Called on the watchdog's thread while a thread with pending work makes no progress.

        ``silent_s`` is how long; 0 when the thread has recovered.
        """

    def thread_broken(self, thread: str) -> None:
        """Called when a bug has ended a thread of the endpoint."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Observers(Observer):
    """Several observers as one. An event goes directly to a single observer that overrides it."""

    def __init__(self, *observers: Observer | None) -> None:
        self.use(*observers)

    def use(self, *observers: Observer | None) -> None:
        """Replace the observers. Call on the loop thread, or before it starts."""
        for event in EVENTS:
            null = getattr(Observer, event)
            methods = [getattr(one, event) for one in observers if one is not None]
            methods = [one for one in methods if getattr(one, "__func__", None) is not null]
            setattr(self, event, methods[0] if len(methods) == 1 else _call_each(methods))


def _call_each(methods: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*event: Any) -> None:
        for method in methods:
            method(*event)

    return call
