"""Base class of the source machine and the target machine: the frame around every step.

A machine holds parts: links, and those of its side. Each part has its own state, a small
interface and a ``check()`` of what must hold after every step.

Sans-IO: no clock, no randomness, no thread. One owner calls ``handle``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from math import inf
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Peer, Session
from kvferry.protocol.events import (
    Action,
    Disconnected,
    Event,
    OwnStall,
    PeerRuns,
    Received,
    Tick,
    WrongVersion,
)
from kvferry.protocol.links import Identity, Link, Links
from kvferry.protocol.messages import Body, Heartbeat
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.states import LinkState


class Machine(ABC):
    """A machine: ``handle(event, now)`` returns the actions of one step."""

    # Whether peers write into this endpoint's memory: then only their end proves that none does.
    exposed: ClassVar[bool]
    peers: Links

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        self.me = identity.peer
        self.incarnation = identity.incarnation
        self.layout = identity.layout
        self.config = config
        self.outbox = Outbox()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one step. A step that raises ``Misuse`` has changed nothing."""
        # Actions of a step that raised are dropped, and time never runs backwards.
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
        """When the next ``Tick`` has something to do; None if there is nothing to wait for."""
        soonest = min(chain(self.peers.timers(), self._timers()), default=inf)
        return None if soonest == inf else soonest

    @property
    def links(self) -> dict[Session, Link]:
        """Every link, by its session."""
        return self.peers.by_session

    @property
    def current(self) -> dict[Peer, Link]:
        """The link that counts for each peer."""
        return self.peers.current

    @property
    def _any_lost(self) -> bool:
        return any(link.state is LinkState.LOST for link in self.links.values())

    @property
    def counts(self) -> Counter[str]:
        """Counters over the machine's life."""
        return self.outbox.counts

    def _on_event(self, event: Event) -> None:
        """Act on an event; machines have events of their own before these."""
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
                raise Misuse(f"{type(self).__name__} does not know {type(event).__name__}")

    def _on_message(self, link: Link, body: Body) -> None:
        """Act on a message; machines have messages of their own before these."""
        self.counts["heartbeats" if isinstance(body, Heartbeat) else "misdirected"] += 1

    @property
    @abstractmethod
    def num_quarantined(self) -> int:
        """Failed rooms whose memory waits for proof from a peer that is lost."""

    @abstractmethod
    def _settle(self) -> None:
        """Draw the consequences of a step: start writes, grant credits, end rooms."""

    @abstractmethod
    def _timers(self) -> Iterable[float]:
        """When rooms want to be woken."""

    @abstractmethod
    def _on_tick(self) -> None:
        """Deadlines and repetitions of rooms."""

    @abstractmethod
    def check(self) -> None:
        """Check the invariants of every part. Called by tests and the simulator after each step."""
