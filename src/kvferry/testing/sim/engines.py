"""Source and target nodes of the simulated world: a machine with an engine of its side.

The engines do what a real one does: hold pages before they ask, push chunks as
they compute them, give rooms up, and reuse pages the moment they get them back.
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
from kvferry.plan.plan import Block
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
from kvferry.protocol.outcome import Done, Outcome
from kvferry.testing.sim.gathers import SimGather
from kvferry.testing.sim.jobs import SimJob, SimPush
from kvferry.testing.sim.memory import SimAllocation, SimMemory, fetch
from kvferry.testing.sim.nodes import Node
from kvferry.testing.sim.wire import Flight, Wire
from kvferry.testing.sim.world import World


@dataclass(frozen=True)
class EnginePolicy:
    """Which blocks are staged: all, none, those that begin at an odd token, or any."""

    mode: str = "mixed"

    def stages(self, block: Block, rng: random.Random) -> bool:
        """Whether a block goes through staging."""
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

    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Open the room, then push what is computed."""
        self.deliver(Open(job.room, self.due.get(job.room, self.world.now)))
        delay = 0.0
        for index, push in enumerate(job.pushes):
            delay += 0.005 + self.world.rng.random() * 0.03 + job.pace_s
            if self.world.strikes("slow_prefill"):
                delay += self.world.rng.random() * 1.5
            if index % 2:
                self.world.at(delay / 2, partial(self._prepare, job, push.tokens))
            self.world.at(delay, partial(self._push, job, allocation, push))
        self.world.at(delay + 0.003, lambda: self._finish(job, allocation))
        if self.world.strikes("cancel_source"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def _working(self, job: SimJob) -> bool:
        return self.process.alive and job.room in self.allocations and job.room not in self.outcomes

    def _prepare(self, job: SimJob, span: Span) -> None:
        if self._working(job) and not self.process.stalled_for:
            self.deliver(Prepare(job.room, span))

    def _push(self, job: SimJob, allocation: SimAllocation, push: SimPush) -> None:
        if self._working(job):
            if self.process.put_off(lambda: self._push(job, allocation, push)):
                return
            for states in (False, True)[: 1 + push.states]:
                self.memory.compute(allocation, push.tokens, push.layers, states=states)
            self.deliver(Push(job.room, push.tokens, push.layers, push.states))

    def _finish(self, job: SimJob, allocation: SimAllocation) -> None:
        if self._working(job):
            if self.process.put_off(lambda: self._finish(job, allocation)):
                return
            self.memory.compute(allocation, Span(0, job.request.num_tokens), states=True)
            self.deliver(Finish(job.room, job.request.num_tokens, job.metadata, job.digest))

    def connect(self, action: Connect) -> None:
        """Reach a target's memory."""
        assert action.hello is not None
        self.pools[action.session] = action.hello.pools
        self.wire.reach(self, action)

    def choose(self, action: Choose) -> None:
        """Answer at once, or when it is too late to matter."""
        staged = tuple(self.policy.stages(block, self.world.rng) for block in action.blocks)
        chosen = Chosen(action.ticket, staged)
        if self.world.strikes("late_choice"):
            self.world.at(self.world.rng.random(), lambda: self.deliver(chosen))
        else:
            self.runner.take(chosen, self.world.now)

    def cut(self, session: Session) -> None:
        """Writes that were handed over go on to their end."""
        self.world.remember(self.peer, ">", f"cut {session}")

    def write(self, action: Write) -> None:
        """Start a write."""
        self.world.remember(self.peer, ">", action)
        self.wire.write(self, action)

    def submit(self, action: Write) -> Flight:
        """Settle what a write reads and writes."""
        transfer = action.transfer
        theirs = {table.group: table.as_page_table() for table in transfer.tables}
        pools = self.pools[transfer.session]
        return Flight(self, action, self._pages(transfer.room), PagedView(pools, theirs))

    def _pages(self, room: Room) -> PagedView:
        return self.memory.side(self.allocations[room].side_tables())

    def gather(self, action: Gather) -> None:
        """Start to fill a local slot."""
        self.world.remember(self.peer, ">", action)
        self.wire.gathers.begin(SimGather(self, action, self._pages(action.transfer.room)))

    def post_gathered(self, action: Post) -> None:
        """Write what was gathered."""
        self.world.remember(self.peer, ">", action)
        self.wire.gathers.post(self, action)

    def discard(self, op: Op) -> None:
        """Let go of what was gathered."""
        self.world.remember(self.peer, ">", Discard(op))
        self.wire.gathers.discard(self, op)

    def before_release(self, room: Room) -> None:
        """Nothing may still read these pages."""
        for flight in self.wire.flights:
            if flight.source is self and flight.action.transfer.room == room:
                self.world.violate("never reuses", f"{self.peer} released pages being read", room)
        if any(gather.transfer.room == room for gather in self.wire.gathers.reading(self)):
            self.world.violate("never reuses", f"{self.peer} released pages being read", room)

    def tables(self) -> dict[str, int]:
        """All of a source machine's tables."""
        machine = self.machine
        return super().tables() | {
            "rooms": len(machine.rooms),
            "writes": len(machine.inflight.writes),
            "undecided": len(machine.writes.modes),
            "local slots in use": machine.config.local_slots - len(machine.local_slots),
        }


class TargetNode(Node):
    """A decode rank."""

    runner: TargetRunner

    def __init__(
        self, world: World, wire: Wire, peer: Peer, memory: SimMemory, prefill: Instance
    ) -> None:
        super().__init__(world, wire, peer, memory)
        self.prefill = prefill
        self.stranger = False
        self.on_failure: Callable[[Room], None] = lambda room: None
        self.jobs: dict[Room, SimJob] = {}

    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Ask for the room's cache."""
        self.jobs[job.room] = job
        tables = tuple(
            PageTableMessage(name, tuple(pages)) for name, pages in allocation.pages.items()
        )
        due = self.due.get(job.room, self.world.now)
        wanted = ReceiveRequest(job.room, job.request, tables, due, job.digest)
        self.deliver(Receive(self.prefill, wanted))
        if self.world.strikes("cancel_target"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def decline(self, job: SimJob, asked_first: bool) -> None:
        """Want nothing of a room: from the start, or after having asked for it."""
        allocation = self.memory.allocate(job.number, job.request) if asked_first else None
        if allocation is None:
            self.deliver(Decline(job.room, self.prefill))
            return
        self.take_on(job, allocation)
        self.world.at(self.world.rng.random() * 0.02, lambda: self.deliver(Cancel(job.room)))

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Remember which attempt the pages were offered to."""
        offer = envelope.body
        if isinstance(offer, Offer) and offer.room in self.allocations:
            self.allocations[offer.room].generation = offer.generation
        super().send(peer, envelope)

    def connect(self, action: Connect) -> None:
        """Sources reach this memory by themselves."""

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into pages, after a while."""
        self.world.remember(self.peer, ">", action)
        delay = 0.001 + self.world.rng.random() * 0.02
        self.world.at(delay, lambda: self._scatter(action))

    def _scatter(self, action: Scatter) -> None:
        if not self.process.alive:
            return
        if self.process.put_off(lambda: self._scatter(action)):
            return
        allocation = self.allocations.get(action.room)
        if allocation is None:
            self.world.violate("never reuses", "a scatter into released pages", action.room)
            return
        plan = self.machine.rooms[action.room].plan
        pair = RankPair(action.source.rank, self.peer.rank)
        side = self.memory.side(allocation.side_tables())
        pieces = bind(plan, pair, action.request, StagingView(), side, action.blocks).descriptors()
        self.memory.store(pieces, fetch([self.memory.slots[action.slot]], pieces))
        self.memory.slots[action.slot][:] = 0
        self.deliver(Scattered(action.op))

    def check_landing(self, source: Peer, action: Write) -> None:
        """A write lands: are these bytes still its to write?"""
        room, generation = action.transfer.room, action.transfer.generation
        allocation = self.allocations.get(room)
        if action.slot is None:
            if allocation is None or allocation.generation != generation:
                self.world.violate("never reuses", "a write into released pages", room)
            return
        book = self.machine.credits
        if action.slot in book.free or action.slot in book.scattering:
            self.world.violate("never reuses", "a write into a slot that is not its", room)

    def reported(self, room: Room, outcome: Outcome) -> None:
        """A room that is done must be right to the last byte."""
        if not isinstance(outcome, Done):
            self.on_failure(room)
            return
        if self.stranger:
            self.world.violate("lets nobody in", f"{self.peer} serves another model", room)
        if outcome.metadata != self.jobs[room].metadata:
            self.world.violate("never corrupts", f"{self.peer} got other metadata", room)
        problem = self.memory.problem(self.allocations[room])
        if problem:
            self.world.violate("never corrupts", f"{self.peer}: {problem}", room)

    def tables(self) -> dict[str, int]:
        """All of a target machine's tables."""
        machine = self.machine
        return super().tables() | {
            "rooms": len(machine.rooms),
            "scatters": len(machine.scatters),
            "accounts": len(machine.credits.accounts),
            "declines": len(machine.declines),
            "slots in use": machine.staging.num_slots - len(machine.credits.free),
        }
