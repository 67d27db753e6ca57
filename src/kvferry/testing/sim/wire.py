"""The simulated transport: gathers that take time, and writes that tear, fail and land late.

A gather reads its pages, and a write its source, at a moment of its own, so memory that is
released too early shows. Nothing cuts a write off: it lands, fails or vanishes in its own time,
and a probe proves a peer dead only when its process has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvferry.endpoint.runner.runner import PeerGone
from kvferry.ids import Op, Peer, Room, Session, SlotIndex
from kvferry.plan.bind import Descriptors, PagedView, RankPair, StagingView, bind
from kvferry.protocol.events import (
    Connect,
    Gather,
    MemoryReached,
    Post,
    Write,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.messages import TransportOffer, TransportOffers
from kvferry.testing.sim.memory import SimMemory, fetch

if TYPE_CHECKING:
    from kvferry.testing.sim.engines import SourceNode, TargetNode
    from kvferry.testing.sim.nodes import Node
    from kvferry.testing.sim.world import World

RETRY_S = 0.1
# Longest delay that the fault "slow_write" adds to a write.
SLOW_WRITE_S = 1.5
TRANSPORTS = TransportOffers((TransportOffer("simulated", "this world"),))


def bind_action(
    action: Write | Gather, source: PagedView, target: PagedView | StagingView | None = None
) -> Descriptors:
    """Return every piece of a write, from the source's pages to the target's or to a slot."""
    transfer, into = action.transfer, target or StagingView()
    pair = RankPair(transfer.source, transfer.peer.rank)
    return bind(transfer.plan, pair, transfer.request, source, into, action.blocks).descriptors()


def fill_slot(
    world: World, memory: SimMemory, slot: SlotIndex, pieces: Descriptors, room: Room
) -> None:
    """Copy pieces of pages into a local slot, which must hold them all."""
    if pieces.length.sum() > memory.slot_bytes:
        world.violate("never corrupts", "a staged write is larger than its slot", room)
    data = fetch(memory.regions, pieces)
    for at, piece in zip(pieces.target_offset, data, strict=True):
        memory.slots[slot][at : at + len(piece)] = np.frombuffer(piece, np.uint8)


# ---------------------------------------------------------------- early gathers


@dataclass(eq=False)
class SimGather:
    """One early gather, until it is posted or discarded and has ended."""

    source: SourceNode
    action: Gather
    source_side: PagedView
    post: Post | None = None
    discarded: bool = False
    over: bool = False

    def fill(self, world: World) -> None:
        """Read the pages into the slot."""
        pieces, room = bind_action(self.action, self.source_side), self.action.transfer.room
        fill_slot(world, self.source.memory, self.action.local_slot, pieces, room)

    def as_write(self) -> Write:
        """Return the write of the gathered slot."""
        assert self.post is not None
        action, post = self.action, self.post
        what = action.op, action.transfer, action.blocks
        return Write(*what, post.note, post.slot, action.local_slot)


class SimGathers:
    """The early gathers of every source. ``write`` submits a gather that is posted and filled."""

    def __init__(self, world: World, write: Callable[[SourceNode, Write], None]) -> None:
        self._world = world
        self._write = write
        self._gathers: dict[tuple[SourceNode, Op], SimGather] = {}
        self.extra_s = 0.0  # Added to the time of every gather.

    def begin(self, gather: SimGather) -> None:
        """Start a gather; it reads its pages at some moment before its end."""
        rng, world = self._world.rng, self._world
        self.check_slot_is_free(
            gather.source, gather.action.local_slot, gather.action.transfer.room
        )
        self._gathers[gather.source, gather.action.op] = gather
        took = 0.001 + rng.random() * 0.01 + (0.0 if world.calm else self.extra_s)
        if world.inject("slow_write"):
            took += rng.random() * 0.5
        world.at(rng.random() * took, lambda: self._fill(gather))
        world.at(took, lambda: self._end(gather))

    def post(self, source: SourceNode, post: Post) -> None:
        """Write the slot when it is filled."""
        gather = self._gathers.get((source, post.op))
        if gather is not None:  # Otherwise it has failed, and the answer is on its way.
            gather.post = post
            self._settle(gather)

    def discard(self, source: SourceNode, op: Op) -> None:
        """Free the slot without a write when the gather has ended."""
        gather = self._gathers.get((source, op))
        if gather is not None:
            gather.discarded = True
            self._settle(gather)

    def check_slot_is_free(self, source: SourceNode, slot: SlotIndex, room: Room) -> None:
        """Check that no other gather still fills the slot."""
        if any(gather.local_slot == slot for gather in self.reading(source)):
            text = f"{source.peer} fills a slot that is being filled"
            self._world.violate("never reuses", text, room)

    def reading(self, source: SourceNode) -> list[Gather]:
        """Return the gathers of a source that may still read pages."""
        mine = (one for one in self._gathers.values() if one.source is source)
        return [gather.action for gather in mine if not gather.over]

    def drop_source(self, source: object) -> None:
        """Drop the gathers of a process that was killed."""
        for key in [key for key in self._gathers if key[0] is source]:
            del self._gathers[key]

    def _fill(self, gather: SimGather) -> None:
        if gather.source.process.alive:
            gather.fill(self._world)

    def _end(self, gather: SimGather) -> None:
        gather.over = True
        if not gather.source.process.alive:
            return
        if self._world.inject("write_failed"):
            self._forget(gather)
            gather.source.deliver(WriteEnded(gather.action.op, WriteFate.FAILED))
        else:
            self._settle(gather)

    def _settle(self, gather: SimGather) -> None:
        """Write or drop a filled slot, if the source has decided which."""
        if not gather.over:
            return
        if gather.discarded:
            self._forget(gather)
            delay = self._world.rng.random() * 0.004
            busy = WriteEnded(gather.action.op, WriteFate.BUSY)
            self._world.at(delay, lambda: gather.source.deliver(busy))
        elif gather.post is not None:
            self._forget(gather)
            self._write(gather.source, gather.as_write())

    def _forget(self, gather: SimGather) -> None:
        del self._gathers[gather.source, gather.action.op]


# ---------------------------------------------------------------- writes


@dataclass(eq=False)
class Flight:
    """One write in flight. What it reads and writes was fixed when it was submitted."""

    source: SourceNode
    action: Write
    source_side: PagedView
    target_side: PagedView
    fate: WriteFate | None = None
    over: bool = False

    @property
    def session(self) -> Session:
        """The session that carries it."""
        return self.action.transfer.session

    def touches(self, peer: Peer, incarnation: int) -> bool:
        """Return whether that incarnation of that peer is at one end."""
        ends = (
            (self.source.peer, self.source.incarnation),
            (self.action.transfer.peer, self.session.target),
        )
        return (peer, incarnation) in ends


class Wire:
    """Every write in flight, and the probes of peers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.flights: list[Flight] = []
        self.gathers = SimGathers(world, self._write_gathered)
        self.extra_s = 0.0  # Added to the time of every write.
        self._reached: set[Session] = set()

    def reach(self, node: Node, action: Connect) -> None:
        """Connect to a target's memory, which takes time and may fail."""
        world, session = self.world, action.session
        event = MemoryReached(session, action.transports[0].name)
        if world.inject("unreached"):
            event = MemoryReached(session, "", ("simulated failure to connect",))
        else:
            self._reached.add(session)
        world.at(world.rng.random() * 0.004, lambda: node.deliver(event))

    def write(self, source: SourceNode, action: Write) -> None:
        """Submit a write, and gather first if it goes through a local slot."""
        flight = self._submit(source, action)
        if flight is None:
            return
        if action.local_slot is not None:
            room = action.transfer.room
            self.gathers.check_slot_is_free(source, action.local_slot, room)
            pieces = bind_action(action, flight.source_side)
            fill_slot(self.world, source.memory, action.local_slot, pieces, room)
        self._schedule(flight)

    def _write_gathered(self, source: SourceNode, action: Write) -> None:
        flight = self._submit(source, action)
        if flight is not None:
            self._schedule(flight)

    def _submit(self, source: SourceNode, action: Write) -> Flight | None:
        """Draw a write's fate; None if the transport is busy."""
        world = self.world
        if action.transfer.session not in self._reached:
            text = f"{source.peer} was asked to write where it reaches nothing"
            world.violate("refuses early", text, action.transfer.room)
        if world.inject("busy"):
            self._answer(source, WriteEnded(action.op, WriteFate.BUSY))
            return None
        flight = source.new_flight(action)
        for kind, fate in (
            ("write_failed", WriteFate.FAILED),
            ("write_unknown", WriteFate.UNKNOWN),
        ):
            if flight.fate is None and world.inject(kind):
                flight.fate = fate
        self.flights.append(flight)
        return flight

    def _schedule(self, flight: Flight) -> None:
        rng = self.world.rng
        delay = 0.002 + rng.random() * 0.01 + (0.0 if self.world.calm else self.extra_s)
        if self.world.inject("slow_write"):
            delay += rng.random() * SLOW_WRITE_S
        if flight.fate is WriteFate.UNKNOWN:
            unknown = WriteEnded(flight.action.op, WriteFate.UNKNOWN)
            self.world.at(delay, lambda: self._answer(flight.source, unknown))
            delay += rng.random() * 2.0
        self.world.at(delay, lambda: self._land(flight))

    def _answer(self, source: SourceNode, event: WriteEnded) -> None:
        self.world.at(self.world.rng.random() * 0.004, lambda: source.deliver(event))

    # ------------------------------------------------------------ landing

    def _land(self, flight: Flight, part: int = 0) -> None:
        """Store the data, possibly in two parts, and then answer the source."""
        if flight.over:
            return
        process = flight.source.process
        wait = process.stalled_for if process.alive else 0.0
        if wait:
            self.world.at(wait + 0.001, lambda: self._land(flight, part))
            return
        pieces, data = self._read(flight)
        half = len(data) // 2
        torn = part == 0 and half > 0 and self.world.inject("torn_write")
        chosen = slice(0, half) if torn else slice(half if part else 0, None)
        if flight.fate is WriteFate.FAILED and self.world.rng.random() < 0.5:
            chosen = slice(0, half)
            torn = False
        if data[chosen] and self.world.inject("flip"):
            data[chosen] = [_flipped(data[chosen][0]), *data[chosen][1:]]
            self.world.flipped.add(flight.action.transfer.room)
        self._store(flight, pieces, data, chosen)
        if torn:
            self.world.at(self.world.rng.random() * 0.3, lambda: self._land(flight, part=1))
            return
        self._end(flight)
        if flight.fate is WriteFate.FAILED:
            self._answer(flight.source, WriteEnded(flight.action.op, WriteFate.FAILED))
        elif flight.fate is None:
            self._answer(flight.source, WriteEnded(flight.action.op))

    def _end(self, flight: Flight) -> None:
        flight.over = True
        if flight in self.flights:
            self.flights.remove(flight)

    def _read(self, flight: Flight) -> tuple[Descriptors | None, list[bytes]]:
        """Return where the bytes go, and the bytes as they are at this moment."""
        slot, memory = flight.action.local_slot, flight.source.memory
        if slot is not None:
            data = memory.slots[slot].tobytes()
            return None, [data[: len(data) // 2], data[len(data) // 2 :]]
        pieces = bind_action(flight.action, flight.source_side, flight.target_side)
        return pieces, fetch(memory.regions, pieces)

    def _store(
        self, flight: Flight, pieces: Descriptors | None, data: list[bytes], chosen: slice
    ) -> None:
        target, action = self._target_of(flight), flight.action
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

    def _target_of(self, flight: Flight) -> TargetNode | None:
        """Return the target if the incarnation that made the offer is alive."""
        node = self.world.nodes.get(flight.action.transfer.peer)
        alive = (
            node is not None and node.process.alive and node.incarnation == flight.session.target
        )
        return node if alive else None  # type: ignore[return-value]

    # ------------------------------------------------------------ probes and deaths

    def probe(self, node: Node, life: tuple[Peer, int], *, until: float = inf) -> None:
        """Probe an incarnation until it is dead or the node no longer wants to know."""
        world = self.world
        if not node.process.alive or not (life in node.peers.probes or world.now < until):
            return
        if node.process.stalled_for or not self._is_gone(life):
            world.at(RETRY_S, lambda: self.probe(node, life, until=until))
        else:
            node.peers.probes.discard(life)
            node.deliver(PeerGone(*life))

    def _is_gone(self, life: tuple[Peer, int]) -> bool:
        """Return whether a process has ended and its writes have landed or vanished."""
        peer, incarnation = life
        other = self.world.nodes.get(peer)
        if other is not None and other.incarnation == incarnation:
            if other.process.has_left:
                return True  # Its liveness port is closed; nobody can see what is in flight.
            if other.process.alive:
                return False
        return not any(flight.touches(peer, incarnation) for flight in self.flights)

    def kill(self, node: Node) -> None:
        """Decide about the writes of a killed process: its own land late or never, others fail."""
        self.gathers.drop_source(node)
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
                    self._answer(flight.source, WriteEnded(flight.action.op, fate))


def _flipped(data: bytes) -> bytes:
    """Return data with one bit of its first byte flipped."""
    return bytes([data[0] ^ 1]) + data[1:]
