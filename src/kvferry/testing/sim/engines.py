"""Source and target nodes of the simulated world, each with the engine of its side.

The engines behave as real ones do: they allocate pages before they start a room, push chunks as
they compute them, cancel rooms, and reuse pages as soon as they are released.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvferry.endpoint.runner.runner import SourceRunner, TargetRunner
from kvferry.ids import Op, Peer, Room, Session
from kvferry.layout.intervals import Span
from kvferry.plan.bind import PagedView, RankPair, StagingView, bind
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block, Request
from kvferry.protocol.events import (
    Cancel,
    Choose,
    Chosen,
    Connect,
    Decline,
    Discard,
    Finish,
    Gather,
    Instance,
    LookUp,
    Open,
    Post,
    Prepare,
    Push,
    Receive,
    ReceiveRequest,
    Scatter,
    Scattered,
    Write,
)
from kvferry.protocol.messages import Envelope, Offer, PageTableMessage
from kvferry.protocol.outcome import Done, FailureCode, Outcome
from kvferry.testing.sim.jobs import SimJob, SimPush
from kvferry.testing.sim.memory import SimAllocation, SimMemory, fetch
from kvferry.testing.sim.nodes import Node
from kvferry.testing.sim.wire import Flight, SimGather, Wire
from kvferry.testing.sim.world import World


@dataclass(frozen=True)
class EnginePolicy:
    """The blocks to stage: all, none, "random", or "mixed": those that begin at an odd token."""

    mode: str = "mixed"

    def stages(self, block: Block, rng: random.Random) -> bool:
        """Return whether a block goes through staging."""
        if self.mode == "random":
            return rng.random() < 0.5
        return self.mode == "all" or (self.mode == "mixed" and block.tokens.first % 2 == 1)


class SourceNode(Node):
    """A prefill rank."""

    runner: SourceRunner

    def __init__(
        self, world: World, wire: Wire, peer: Peer, memory: SimMemory, policy: EnginePolicy
    ) -> None:
        super().__init__(world, wire, peer, memory)
        self.policy = policy
        self.pools: dict[Session, PoolMap] = {}
        self.on_look_up: Callable[[LookUp], None] = lambda action: None
        # When the machine first asked about each room, or the engine answered.
        self.looked_up: dict[Room, float] = {}
        # Rooms for which the engine has pinned a prefix.
        self.pinned: set[Room] = set()

    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Open the room, then push chunks as they are computed."""
        self.deliver(Open(job.room, self.due.get(job.room, self.world.now)))
        delay = 0.0
        for index, push in enumerate(job.pushes):
            delay += 0.005 + self.world.rng.random() * 0.03 + job.pace_s
            if self.world.inject("slow_prefill"):
                delay += self.world.rng.random() * 1.5
            if index % 2:
                self.world.at(delay / 2, partial(self._prepare, job, push.tokens))
            self.world.at(delay, partial(self._push, job, allocation, push))
        self.world.at(delay + 0.003, lambda: self._finish(job, allocation))
        if self.world.inject("cancel_source"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def _is_working_on(self, job: SimJob) -> bool:
        return self.process.alive and job.room in self.allocations and job.room not in self.outcomes

    def _prepare(self, job: SimJob, span: Span) -> None:
        if self._is_working_on(job) and not self.process.stalled_for:
            self.deliver(Prepare(job.room, span))

    def _push(self, job: SimJob, allocation: SimAllocation, push: SimPush) -> None:
        if self._is_working_on(job):
            if self.process.defer(lambda: self._push(job, allocation, push)):
                return
            for states in (False, True)[: 1 + push.states]:
                self.memory.compute(allocation, push.tokens, push.layers, states=states)
            self.deliver(Push(job.room, push.tokens, push.layers, push.states))

    def _finish(self, job: SimJob, allocation: SimAllocation) -> None:
        if self._is_working_on(job):
            if self.process.defer(lambda: self._finish(job, allocation)):
                return
            self.memory.compute(allocation, Span(0, job.request.num_tokens), states=True)
            self.deliver(Finish(job.room, job.request.num_tokens, job.metadata, job.digest))

    def connect(self, action: Connect) -> None:
        """Connect to a target's memory."""
        assert action.hello is not None
        self.pools[action.session] = action.hello.pools
        self.wire.reach(self, action)

    def choose(self, action: Choose) -> None:
        """Answer at once, or later, even when the answer no longer matters."""
        staged = tuple(self.policy.stages(block, self.world.rng) for block in action.blocks)
        chosen = Chosen(action.ticket, staged)
        if self.world.inject("late_choice"):
            self.world.at(self.world.rng.random(), lambda: self.deliver(chosen))
        else:
            self.runner.take(chosen, self.world.now)

    def look_up(self, action: LookUp) -> None:
        """Let the engine look up what it holds."""
        self.world.record(self.peer, ">", action)
        self.looked_up[action.room] = self.world.now
        self.on_look_up(action)

    def cut(self, session: Session) -> None:
        """Let submitted writes continue to their end."""
        self.world.record(self.peer, ">", f"cut {session}")

    def write(self, action: Write) -> None:
        """Start a write."""
        self.world.record(self.peer, ">", action)
        self.wire.write(self, action)

    def new_flight(self, action: Write) -> Flight:
        """Return a write with the pages that it reads and writes."""
        transfer = action.transfer
        target = PagedView(self.pools[transfer.session], transfer.page_tables)
        return Flight(self, action, self._side(transfer.room), target)

    def _side(self, room: Room) -> PagedView:
        return self.memory.side(self.allocations[room])

    def gather(self, action: Gather) -> None:
        """Start an early gather."""
        self.world.record(self.peer, ">", action)
        self.wire.gathers.begin(SimGather(self, action, self._side(action.transfer.room)))

    def post_gathered(self, action: Post) -> None:
        """Write a gathered slot."""
        self.world.record(self.peer, ">", action)
        self.wire.gathers.post(self, action)

    def discard(self, op: Op) -> None:
        """Discard a gather."""
        self.world.record(self.peer, ">", Discard(op))
        self.wire.gathers.discard(self, op)

    def check_step(self) -> None:
        """Check that no prefix stays pinned that some target does not claim."""
        config = self.machine.config
        patience_s = config.unclaimed_offer_ttl_s + config.resend_s
        for name, asked_at in self.looked_up.items():
            room = self.machine.rooms.get(name)
            if room is None or room.failure or not room.known_to_engine:
                continue
            is_late = self.world.now > asked_at + patience_s
            if is_late and room.expects_targets(self.peer.rank):
                self.world.violate("never leaks", f"{self.peer} pins what nobody claims", name)

    def check_release(self, room: Room) -> None:
        """Check that no write and no gather still reads the room's pages."""
        writes = (flight.action for flight in self.wire.flights if flight.source is self)
        rooms = [write.transfer.room for write in writes]
        rooms += [gather.transfer.room for gather in self.wire.gathers.reading(self)]
        if room in rooms:
            self.world.violate("never reuses", f"{self.peer} released pages being read", room)


class TargetNode(Node):
    """A decode rank."""

    runner: TargetRunner

    def __init__(
        self, world: World, wire: Wire, peer: Peer, memory: SimMemory, holders: dict[str, Instance]
    ) -> None:
        super().__init__(world, wire, peer, memory)
        self.holders = holders
        self.is_stranger = False
        self.on_failure: Callable[[Room], None] = lambda room: None
        self.jobs: dict[Room, SimJob] = {}

    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Receive the room."""
        self.jobs[job.room] = job
        tables = tuple(
            PageTableMessage(name, tuple(pages)) for name, pages in allocation.pages.items()
        )
        due = self.due.get(job.room, self.world.now)
        digest = b"" if job.chain else job.digest
        wanted = ReceiveRequest(job.room, job.request, tables, due, digest, job.chain)
        self.deliver(Receive(self.holders[job.prefill], wanted))
        if self.world.inject("cancel_target"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def decline(self, job: SimJob, asked_first: bool) -> None:
        """Decline a room, at once or after asking for it."""
        allocation = self.memory.allocate(job.number, job.request) if asked_first else None
        if allocation is None:
            self.deliver(Decline(job.room, self.holders[job.prefill]))
            return
        self.start_in(job, allocation)
        self.world.at(self.world.rng.random() * 0.02, lambda: self.deliver(Cancel(job.room)))

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send a frame, and note the generation in which pages are offered."""
        offer = envelope.body
        if isinstance(offer, Offer) and offer.room in self.allocations:
            self.allocations[offer.room].generation = offer.generation
            self.world.offered[offer.room].add(self.peer)
        super().send(peer, envelope)

    def connect(self, action: Connect) -> None:
        """Do nothing: sources connect to this memory."""

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages, after a while."""
        self.world.record(self.peer, ">", action)
        delay = 0.001 + self.world.rng.random() * 0.02
        self.world.at(delay, lambda: self._scatter(action))

    def _scatter(self, action: Scatter) -> None:
        if not self.process.alive:
            return
        if self.process.defer(lambda: self._scatter(action)):
            return
        allocation = self.allocations.get(action.room)
        if allocation is None:
            self.world.violate("never reuses", "a scatter into released pages", action.room)
            return
        plan = self.machine.rooms[action.room].plan
        pair = RankPair(action.source.rank, self.peer.rank)
        side = self.memory.side(allocation)
        pieces = bind(plan, pair, action.request, StagingView(), side, action.blocks).descriptors()
        self.memory.store(pieces, fetch([self.memory.slots[action.slot]], pieces))
        self.memory.slots[action.slot][:] = 0
        self.deliver(Scattered(action.op))

    def check_landing(self, source: Peer, action: Write) -> None:
        """Check that a write that lands may still write these bytes."""
        room, generation = action.transfer.room, action.transfer.generation
        allocation = self.allocations.get(room)
        if action.slot is None:
            if allocation is None or allocation.generation != generation:
                self.world.violate("never reuses", "a write into released pages", room)
            return
        book = self.machine.credits
        if action.slot in book.free or action.slot in book.scattering:
            self.world.violate(
                "never reuses", "a write into a slot that was not promised to it", room
            )

    def check_outcome(self, room: Room, outcome: Outcome) -> None:
        """Check every byte of a room that is done."""
        if not isinstance(outcome, Done):
            corrupt = outcome.code is FailureCode.CONTENT_CORRUPT
            if corrupt and room not in self.world.flipped:
                self.world.violate("never corrupts", f"{self.peer} doubts right content", room)
            self.on_failure(room)
            return
        if self.is_stranger:
            self.world.violate("lets nobody in", f"{self.peer} serves another model", room)
        job, allocation = self.jobs[room], self.allocations[room]
        if job.chain is not None:
            assert outcome.pulled is not None
            self.world.counts["pulled" if outcome.pulled else "pulled-nothing"] += 1
            allocation.request = Request(outcome.pulled, min(job.request.prefix, outcome.pulled))
            ranks = {peer for peer in self.world.nodes if peer.instance == self.peer.instance}
            if outcome.pulled and not ranks <= self.world.offered[room]:
                text = f"{self.peer} pulled before each rank had the answer"
                self.world.violate("never corrupts", text, room)
        if outcome.metadata != (b"" if outcome.pulled == 0 else job.metadata):
            self.world.violate("never corrupts", f"{self.peer} got other metadata", room)
        error = self.memory.find_error(allocation)
        if error:
            self.world.violate("never corrupts", f"{self.peer}: {error}", room)
