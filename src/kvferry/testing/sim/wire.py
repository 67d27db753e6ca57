"""The simulated transport: writes that take time, tear, fail, and land late.

A write reads its source when it lands, not when it is asked for, so memory that
was given up too early shows. Nothing cuts a write off: it lands, fails or vanishes
when it likes, just as in life, and whoever asks after a peer hears that it is gone
only when its process is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvferry.endpoint.runner.runner import PeerGone
from kvferry.ids import Peer, Session
from kvferry.plan.bind import Descriptors, PagedView, RankPair, StagingView, bind
from kvferry.protocol.events import (
    Connect,
    MemoryReached,
    MemoryUnreached,
    SendFailed,
    Sent,
    Write,
    WriteFate,
)
from kvferry.protocol.messages import TransportOffer, TransportOffers
from kvferry.testing.sim.gathers import SimGathers, fill_slot
from kvferry.testing.sim.memory import fetch

if TYPE_CHECKING:
    from kvferry.testing.sim.engines import SourceNode, TargetNode
    from kvferry.testing.sim.nodes import Node
    from kvferry.testing.sim.world import World

RETRY_S = 0.1
# Longest delay that the fault "slow_write" adds to a write.
SLOW_WRITE_S = 1.5
TRANSPORTS = TransportOffers((TransportOffer("simulated", "this world"),))


@dataclass(eq=False)
class Flight:
    """One write under way. What it reads and writes was settled when it was submitted."""

    source: SourceNode
    action: Write
    ours: PagedView
    theirs: PagedView
    fate: WriteFate | None = None
    over: bool = False

    @property
    def session(self) -> Session:
        """The session that carries it."""
        return self.action.transfer.session

    @property
    def pair(self) -> RankPair:
        """The two ranks."""
        return RankPair(self.source.peer.rank, self.action.transfer.peer.rank)

    def touches(self, peer: Peer, incarnation: int) -> bool:
        """Whether that life of that peer is at one end."""
        ends = (
            (self.source.peer, self.source.incarnation),
            (self.action.transfer.peer, self.session.target),
        )
        return (peer, incarnation) in ends

    def bind(self, target: PagedView | StagingView) -> Descriptors:
        """Every piece, from the source's pages into the target's or into an image."""
        plan, request = self.action.transfer.plan, self.action.transfer.request
        return bind(plan, self.pair, request, self.ours, target, self.action.blocks).descriptors()


class Wire:
    """Every write in flight, and who asks whether somebody still lives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.flights: list[Flight] = []
        self.gathers = SimGathers(world, self._write_gathered)
        self.extra_s = 0.0  # every write takes so much longer
        self._reached: set[Session] = set()

    def reach(self, node: Node, action: Connect) -> None:
        """Reach a target's memory, which takes time and may not work."""
        world, session = self.world, action.session
        event: MemoryReached | MemoryUnreached = MemoryReached(session, action.transports[0].name)
        if world.strikes("unreached"):
            event = MemoryUnreached(session, ("simulated: that is how it is",))
        else:
            self._reached.add(session)
        world.at(world.rng.random() * 0.004, lambda: node.deliver(event))

    # ------------------------------------------------------------ writing

    def write(self, source: SourceNode, action: Write) -> None:
        """Start a write and decide how it will go."""
        flight = self._start(source, action)
        if flight is not None:
            self._gather(flight)
            self._schedule(flight)

    def _write_gathered(self, source: SourceNode, action: Write) -> None:
        """The same, of a slot that is filled."""
        flight = self._start(source, action)
        if flight is not None:
            self._schedule(flight)

    def _start(self, source: SourceNode, action: Write) -> Flight | None:
        world = self.world
        if action.transfer.session not in self._reached:
            text = f"{source.peer} was asked to write where it reaches nothing"
            world.violate("says no early", text, action.transfer.room)
        if world.strikes("busy"):
            self._answer(source, SendFailed(action.op, WriteFate.BUSY))
            return None
        flight = source.submit(action)
        for kind, fate in (
            ("write_failed", WriteFate.FAILED),
            ("write_unknown", WriteFate.UNKNOWN),
        ):
            if flight.fate is None and world.strikes(kind):
                flight.fate = fate
        self.flights.append(flight)
        return flight

    def _gather(self, flight: Flight) -> None:
        """Fill the local slot of a staged write."""
        slot, memory = flight.action.local_slot, flight.source.memory
        if slot is None:
            return
        room = flight.action.transfer.room
        self.gathers.demand_free(flight.source, slot, room)
        fill_slot(self.world, memory, slot, flight.bind(StagingView()), room)

    def _schedule(self, flight: Flight) -> None:
        rng = self.world.rng
        delay = 0.002 + rng.random() * 0.01 + (0.0 if self.world.calm else self.extra_s)
        if self.world.strikes("slow_write"):
            delay += rng.random() * SLOW_WRITE_S
        if flight.fate is WriteFate.UNKNOWN:
            self.world.at(delay, lambda: self._doubt(flight))
            delay += rng.random() * 2.0
        self.world.at(delay, lambda: self._land(flight))

    def _doubt(self, flight: Flight) -> None:
        self._answer(flight.source, SendFailed(flight.action.op, WriteFate.UNKNOWN))

    def _answer(self, source: SourceNode, event: Sent | SendFailed) -> None:
        self.world.at(self.world.rng.random() * 0.004, lambda: source.deliver(event))

    def _land(self, flight: Flight, part: int = 0) -> None:
        """The data arrives, maybe in two parts, and then the answer."""
        if flight.over:
            return
        process = flight.source.process
        wait = process.stalled_for if process.alive else 0.0
        if wait:
            self.world.at(wait + 0.001, lambda: self._land(flight, part))
            return
        pieces, data = self._pieces(flight)
        half = len(data) // 2
        torn = part == 0 and half > 0 and self.world.strikes("torn_write")
        chosen = slice(0, half) if torn else slice(half if part else 0, None)
        if flight.fate is WriteFate.FAILED and self.world.rng.random() < 0.5:
            chosen = slice(0, half)
            torn = False
        self._store(flight, pieces, data, chosen)
        if torn:
            self.world.at(self.world.rng.random() * 0.3, lambda: self._land(flight, part=1))
            return
        self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        self._end(flight)
        if flight.fate is WriteFate.FAILED:
            self._answer(flight.source, SendFailed(flight.action.op, WriteFate.FAILED))
        elif flight.fate is None:
            self._answer(flight.source, Sent(flight.action.op))

    def _end(self, flight: Flight) -> None:
        flight.over = True
        if flight in self.flights:
            self.flights.remove(flight)

    def _target(self, flight: Flight) -> TargetNode | None:
        """The receiver, if the incarnation that made the offer still lives."""
        node = self.world.nodes.get(flight.action.transfer.peer)
        alive = (
            node is not None and node.process.alive and node.incarnation == flight.session.target
        )
        return node if alive else None  # type: ignore[return-value]

    def _pieces(self, flight: Flight) -> tuple[Descriptors | None, list[bytes]]:
        """Where the bytes go, and the bytes as they are at this moment."""
        slot, memory = flight.action.local_slot, flight.source.memory
        if slot is not None:
            data = memory.slots[slot].tobytes()
            return None, [data[: len(data) // 2], data[len(data) // 2 :]]
        pieces = flight.bind(flight.theirs)
        return pieces, fetch(memory.regions, pieces)

    def _store(
        self, flight: Flight, pieces: Descriptors | None, data: list[bytes], chosen: slice
    ) -> None:
        target, action = self._target(flight), flight.action
        if target is None:
            return
        target.check_landing(flight.source.peer, action)
        if pieces is None:
            assert action.slot is not None
            slot, offset = target.memory.slots[action.slot], len(data[0]) if chosen.start else 0
            piece = np.frombuffer(b"".join(data[chosen]), np.uint8)
            slot[offset : offset + len(piece)] = piece
        else:
            part = Descriptors(*(column[chosen] for column in pieces))
            target.memory.store(part, data[chosen])

    # ------------------------------------------------------------ lives

    def ask(self, node: Node, life: tuple[Peer, int], *, until: float = inf) -> None:
        """Ask after a life, again and again while somebody wants to know."""
        world = self.world
        if not node.process.alive or not (life in node.peers.probes or world.now < until):
            return
        if node.process.stalled_for or not self._is_gone(life):
            world.at(RETRY_S, lambda: self.ask(node, life, until=until))
        else:
            node.peers.probes.discard(life)
            node.deliver(PeerGone(*life))

    def _is_gone(self, life: tuple[Peer, int]) -> bool:
        """Whether a process is over and what it had sent has arrived or vanished."""
        peer, incarnation = life
        other = self.world.nodes.get(peer)
        if other is not None and other.incarnation == incarnation and other.process.has_left:
            # Its liveness_port is closed. Nobody can see what is in flight.
            return True
        if other is not None and other.process.alive and other.incarnation == incarnation:
            return False
        return not any(flight.touches(peer, incarnation) for flight in self.flights)

    def confirm_dead(self, node: Node) -> None:
        """A process was killed: its writes land late or never; writes to it fail."""
        self.gathers.confirm_dead(node)
        for flight in list(self.flights):
            if flight.source is node:
                if self.world.rng.random() < 0.5:
                    self._end(flight)
                else:
                    flight.fate = WriteFate.UNKNOWN
            elif flight.action.transfer.peer == node.peer:
                self._end(flight)
                if flight.fate is not WriteFate.UNKNOWN:
                    fate = WriteFate.FAILED if self.world.rng.random() < 0.7 else WriteFate.UNKNOWN
                    self._answer(flight.source, SendFailed(flight.action.op, fate))
