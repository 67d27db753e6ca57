"""The interface between an endpoint's loop and whatever observes it.

The loop and its ports know ``Observer`` and nothing behind it. Metrics, traces and spans
implement it; so may an application. Events carry objects that the loop has anyway, so an event
that nobody looks at costs one call of an empty method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.plan.choose import TransferMode
from kvferry.protocol.events import Gather, Write, WriteFate
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Outcome
from kvferry.telemetry.steps import Moment
from kvferry.telemetry.tags import RoomTag


class ObservedRoom(Protocol):
    """Fields of a room's handle that observers may read."""

    room: Room
    tag: RoomTag
    begun: float
    # When a source's engine had pushed everything.
    finished: float | None


class ObservedWrite(Protocol):
    """Fields of an ended write that observers may read. ``fate`` is None if it succeeded."""

    action: Write | Gather
    fate: WriteFate | None
    mode: TransferMode
    num_bytes: int
    num_pieces: int
    seconds: float
    transport: str


class LoopStatus(NamedTuple):
    """An endpoint at the time ``at``. ``links`` and ``counts`` are the machine's own.

    They change as soon as ``status`` has returned.
    """

    at: float
    num_open: int
    num_quarantined: int
    staging_used_bytes: int
    staging_bytes: int
    links: Collection[Link]
    counts: Mapping[str, int]


class Observer:
    """Receives the events of one endpoint. This class ignores them all: it is the null default.

    Override what you need. Every method is called on the loop thread, except ``thread_stalled``.
    An observer must not wait, must not raise, and must not change or keep what it is given:
    the loop reuses handles and machines' tables. Times are those of ``time.monotonic``.
    """

    def room_opened(self, room: ObservedRoom) -> None:
        """The engine has opened a room (source) or asked for it (target)."""

    def step(self, room: Room, moment: Moment, tokens: Span | None = None) -> None:
        """A step without a frame: the engine has ``pushed`` tokens, or a failed room's memory is
        ``released``."""

    def frame_in(self, envelope: Envelope) -> None:
        """A valid frame has arrived; the machine handles it next."""

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        """A frame is queued for a peer and leaves before the loop's turn ends."""

    def write(self, job: ObservedWrite, at: float) -> None:
        """A write to a peer has ended at that time, well or not."""

    def copy(
        self, room: Room, peer: Peer, moment: Moment, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """A copy out of pages (``gathered``) or into them (``scattered``) has ended at ``at``."""

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """A room is done or has failed; its engine hears of it right after this."""

    def link_up(self, peer: Peer, transport: str) -> None:
        """A peer's memory is reached by that transport, or ours by the peer."""

    def refused(self, what: str, times: int = 1) -> None:
        """A frame, a connection or something else was refused."""

    def status(self, status: LoopStatus) -> None:
        """Called a few times a second while the endpoint has rooms or links."""

    def thread_stalled(self, thread: str, silent_s: float) -> None:
        """A thread with pending work is overdue by so long; 0 when it has recovered.

        Called on the watchdog's thread.
        """

    def thread_broken(self, thread: str) -> None:
        """A bug has ended a thread of the endpoint."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Observers(Observer):
    """Several observers as one. An event goes straight to the only one that overrides it."""

    def __init__(self, *observers: Observer) -> None:
        self.use(*observers)

    def use(self, *observers: Observer) -> None:
        """Observe with these from now on. On the loop thread, or before it starts."""
        for event in EVENTS:
            null = getattr(Observer, event)
            heard = [getattr(one, event) for one in observers]
            heard = [one for one in heard if getattr(one, "__func__", None) is not null]
            setattr(self, event, heard[0] if len(heard) == 1 else _each(heard))


def _each(heard: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*event: Any) -> None:
        for one in heard:
            one(*event)

    return call


def together(*observers: Observer | None) -> Observer:
    """One observer for those that there are."""
    there = [one for one in observers if one is not None]
    return there[0] if len(there) == 1 else Observers(*there) if there else Observer()
