"""Base class of the source machine and the target machine.

A machine holds parts: links, and the parts of its side. Each part has its own state, a small
interface and a ``check()`` of its invariants.

Sans-IO: a machine has no clock, randomness or thread. One owner calls ``handle``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from math import inf
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Room, Session
from kvferry.protocol.events import (
    Action,
    Disconnected,
    Event,
    Outbox,
    OwnStall,
    PeerRuns,
    Received,
    Tick,
    WrongVersion,
)
from kvferry.protocol.inbound import TargetRoom
from kvferry.protocol.links import Identity, Link, Links
from kvferry.protocol.messages import Body, Heartbeat, Refuse
from kvferry.protocol.outbound import SourceRoom
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import LinkState


class Machine(ABC):
    """A sans-IO state machine: ``handle(event, now)`` returns the actions of one step."""

    # Whether peers write into this endpoint's memory, so that a release needs proof from them.
    exposed: ClassVar[bool]
    peers: Links
    rooms: Mapping[Room, SourceRoom | TargetRoom]

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        self.me = identity.peer
        self.incarnation = identity.incarnation
        self.layout = identity.layout
        self.config = config
        self.outbox = Outbox()
        # Counters over the machine's lifetime.
        self.counts = self.outbox.counts

    def handle(self, event: Event, now: float) -> list[Action]:
        """Run one step and return its actions. A step that raises ``Misuse`` changes nothing."""
        # Drop the actions of a step that raised, and never let time run backwards.
        outbox = self.outbox
        outbox.now = max(outbox.now, now)
        outbox.actions = []
        if isinstance(event, Received):
            link = self.peers.receive(event.envelope)
            if link is not None:
                self._on_message(link, event.envelope.body)
        else:
            self._on_event(event)
        self._settle()
        actions, outbox.actions = outbox.actions, []
        return actions

    def wakeup(self) -> float | None:
        """Return when the next ``Tick`` is needed; None if no timer is pending."""
        soonest = min(chain(self.peers.timers(), self._timers()), default=inf)
        return None if soonest == inf else soonest

    @property
    def links(self) -> dict[Session, Link]:
        """Every link, by session."""
        return self.peers.by_session

    def status(self, name: Room) -> Status | None:
        """Return the progress of a room; None if the engine is not waiting for it."""
        room = self.rooms.get(name)
        return room.status if room else None

    @property
    def num_quarantined(self) -> int:
        """Number of failed rooms whose memory waits for proof from a lost peer."""
        if all(link.state is not LinkState.LOST for link in self.links.values()):
            return 0
        return sum(room.is_quarantined for room in self.rooms.values())

    def _room_refusal(self, deadline: float, num_rooms: int) -> Failure | None:
        """Return why this endpoint can't take a room beside ``num_rooms`` others."""
        if deadline <= self.outbox.now:
            return Failure.of(FailureCode.DEADLINE, "the deadline had passed at the start")
        if num_rooms >= self.config.max_rooms:
            return Failure.of(FailureCode.TOO_MANY_ROOMS, f"{num_rooms} rooms are open here")
        if self.num_quarantined >= self.config.max_quarantined_rooms:
            text = f"{self.num_quarantined} failed rooms wait for proof from lost peers"
            return Failure.of(FailureCode.QUARANTINE_FULL, text)
        return None

    def _on_event(self, event: Event) -> None:
        """Handle an event that both machines have; subclasses handle their own first."""
        match event:
            case Tick():
                self.peers.tick()
                self._on_tick()
            case Disconnected():
                self.peers.disconnected(event)
            case WrongVersion():
                self.peers.wrong_version(event)
            case PeerRuns():
                self.peers.peer_runs(event)
            case OwnStall():
                self.peers.own_stall(event)
            case _:
                raise Misuse(f"{type(self).__name__} does not handle {type(event).__name__}")

    def _on_message(self, link: Link, body: Body) -> None:
        """Handle a message that both machines receive; subclasses handle their own first."""
        if isinstance(body, Refuse):
            self.peers.refused(link, body)
        else:
            self.counts["heartbeats" if isinstance(body, Heartbeat) else "misdirected"] += 1

    @abstractmethod
    def _settle(self) -> None:
        """Finish a step: start writes, close transfers, grant credits."""

    @abstractmethod
    def _timers(self) -> Iterable[float]:
        """Return the times at which rooms need a tick."""

    @abstractmethod
    def _on_tick(self) -> None:
        """Handle deadlines and resends of rooms."""

    @abstractmethod
    def check(self) -> None:
        """Check the invariants of every part. Tests and the simulator call it after each step."""
