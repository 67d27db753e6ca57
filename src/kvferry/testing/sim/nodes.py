"""Endpoints of the simulated world: a real machine, an engine, and memory.

The engines do what a real one does: hold pages before they ask, push chunks as
they compute them, give rooms up, and reuse pages the moment they get them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.plan.bind import Image, Pair, Side, bind
from kvferry.plan.plan import Request
from kvferry.protocol.codec import BadFrame, FrameFault
from kvferry.protocol.endpoint import Endpoint
from kvferry.protocol.events import (
    Action,
    Cancel,
    Disconnect,
    Event,
    Finish,
    Instance,
    Open,
    Prepare,
    Push,
    Receive,
    Received,
    Release,
    Report,
    Scatter,
    Scattered,
    Send,
    Tick,
    Write,
    WrongVersion,
)
from kvferry.protocol.messages import Envelope, Offer, Table
from kvferry.protocol.outcome import Done, Outcome
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine
from kvferry.testing.sim.memory import Allocation, Memory, fetch
from kvferry.testing.sim.wire import Flight, Wire
from kvferry.testing.sim.world import World


@dataclass(frozen=True)
class Job:
    """One request: its room, what prefill will push, and which decode wants it."""

    room: Room
    number: int
    request: Request
    chunks: tuple[Span, ...]
    decode: str
    deadline_s: float
    metadata: bytes
    probe: bool = False

    @property
    def digest(self) -> bytes:
        """What tells this request from another, whatever room it was given."""
        return f"request {self.number}".encode()


class Node(ABC):
    """One process: alive, stopped or dead."""

    machine: Endpoint

    def __init__(self, world: World, wire: Wire, peer: Peer, memory: Memory) -> None:
        self.world = world
        self.wire = wire
        self.peer = peer
        self.memory = memory
        self.alive = True
        self.stalled_until = 0.0
        self.outcomes: dict[Room, Outcome] = {}
        self.allocations: dict[Room, Allocation] = {}
        self.due: dict[Room, float] = {}
        self._tick_at: float | None = None
        self._backlog: list[Callable[[], None]] = []

    @property
    def incarnation(self) -> int:
        """The machine's id of this life."""
        return self.machine.incarnation

    @property
    def stalled_for(self) -> float:
        """Seconds until the process goes on; 0 if it runs."""
        return max(0.0, self.stalled_until - self.world.now)

    # ------------------------------------------------------------ steps

    def receive(self, envelope: Envelope) -> None:
        """A frame came."""
        self.deliver(Received(envelope))

    def refuse(self, bad: BadFrame) -> None:
        """Bytes came that are no message."""
        self.world.happened[f"refused-{bad.fault}"] += 1
        if bad.fault is FrameFault.VERSION and bad.header is not None:
            header = bad.header
            answered = header.seq == 0
            self.deliver(WrongVersion(header.sender, header.session, header.version, answered))

    def deliver(self, event: Event) -> None:
        """Let the machine take a step, and carry out what it says."""
        if not self.alive:
            return
        if self.put_off(lambda: self.deliver(event)):
            return
        self.world.steps += 1
        if not isinstance(event, Tick):
            self.world.remember(self.peer, "<", event)
        for action in self.machine.handle(event, self.world.now):
            self.world.remember(self.peer, ">", action)
            self.perform(action)
        self.check()
        if isinstance(event, Tick):
            self._check_deadlines()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        wakeup = self.machine.wakeup()
        if wakeup is None or (self._tick_at is not None and self._tick_at <= wakeup):
            return
        self._tick_at = wakeup
        # Never at once: a machine that asks for the past must not stop the clock.
        self.world.at(max(1e-3, wakeup - self.world.now), lambda: self._tick(wakeup))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # an earlier one was planned meanwhile
        self._tick_at = None
        wakeup = self.machine.wakeup()
        if wakeup is not None and wakeup > self.world.now:
            self._schedule_tick()  # what it was for has been done or put off meanwhile
        else:
            self.deliver(Tick())

    def perform(self, action: Action) -> None:
        """Carry out one action."""
        match action:
            case Send(peer=peer, envelope=envelope):
                self.world.send(self.peer, peer, envelope)
            case Disconnect():
                self.wire.disconnect(self, action)
            case Report(room=room, outcome=outcome):
                self._report(room, outcome)
            case Release(room=room):
                self._release(room)
            case _:
                self.move(action)

    @abstractmethod
    def move(self, action: Action) -> None:
        """Carry out a write or a scatter."""

    def check(self) -> None:  # noqa: B027
        """What must hold after every step."""

    def _check_deadlines(self) -> None:
        """A process that was stopped learns the time with its next tick, like any other."""
        for room, due in self.due.items():
            if self.world.now > due + 3e-3 and room not in self.outcomes:
                self.world.violate("never hangs", f"{self.peer} is past its deadline", room)

    def _report(self, room: Room, outcome: Outcome) -> None:
        if room in self.outcomes:
            self.world.violate("never hangs", f"{self.peer} reported twice", room)
        self.outcomes[room] = outcome
        self.due.pop(room, None)
        self.reported(room, outcome)

    def reported(self, room: Room, outcome: Outcome) -> None:  # noqa: B027
        """The engine hears how a room ended."""

    def _release(self, room: Room) -> None:
        allocation = self.allocations.pop(room, None)
        if allocation is None or room not in self.outcomes:
            self.world.violate("never leaks", f"{self.peer} released a room not reported", room)
            return
        self.before_release(room)
        self.memory.release(allocation)

    def before_release(self, room: Room) -> None:  # noqa: B027
        """A last look at memory that is about to be reused."""

    # ------------------------------------------------------------ life and death

    def stall(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.stalled_until = max(self.stalled_until, self.world.now + seconds)
        self.world.at(seconds, self.resume)

    def resume(self) -> None:
        """Go on, with everything that came meanwhile, in its order."""
        if self.stalled_for > 1e-9:
            return
        self.stalled_until = 0.0
        backlog, self._backlog = self._backlog, []
        for then in backlog:
            then()

    def put_off(self, then: Callable[[], None]) -> bool:
        """Whether the process is stopped; if so, it does that when it goes on, in order."""
        if self.stalled_for:
            self._backlog.append(then)
        return self.stalled_for > 0

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.wire.bury(self)

    def leftovers(self) -> list[str]:
        """What a machine and an engine still hold when nothing is going on."""
        names = [f"room {room!r}" for room in [*self.allocations, *self.due]]
        return names + [f"{key}: {value}" for key, value in self.tables().items() if value]

    def tables(self) -> dict[str, int]:
        """Sizes of the machine's tables, all 0 when nothing is going on."""
        lost = [link for link in self.machine.links.values() if link.state is LinkState.LOST]
        return {"lost links": len(lost)}

    def _too_late(self, job: Job) -> bool:
        """Whoever still waits for pages when the faults stop gives up: probes come next."""
        return self.world.calm and not job.probe

    def _start_when_pages_are_free(self, job: Job, until: float) -> None:
        if not self.alive or self.world.now > until or self._too_late(job):
            return
        if self.put_off(lambda: self._start_when_pages_are_free(job, until)):
            return
        allocation = self.memory.allocate(job.number, job.request)
        if allocation is None:
            self.world.happened["pool-full"] += 1
            self.world.at(0.05, lambda: self._start_when_pages_are_free(job, until))
            return
        self.allocations[job.room] = allocation
        self.due[job.room] = self.world.now + job.deadline_s
        self.begin(job, allocation)

    @abstractmethod
    def begin(self, job: Job, allocation: Allocation) -> None:
        """Pages are held: tell the machine."""

    def start(self, job: Job) -> None:
        """Take on a job as soon as there are pages for it."""
        if not self.stalled_for:
            self._start_when_pages_are_free(job, self.world.now + job.deadline_s)


class SourceNode(Node):
    """A prefill rank."""

    machine: SourceMachine

    def begin(self, job: Job, allocation: Allocation) -> None:
        """Open the room, then push chunk after chunk."""
        self.deliver(Open(job.room, self.due.get(job.room, self.world.now)))
        delay = 0.0
        for index, span in enumerate(job.chunks):
            delay += 0.005 + self.world.rng.random() * 0.03
            if self.world.strikes("slow_prefill"):
                delay += self.world.rng.random() * 1.5
            if index % 2:
                self.world.at(delay / 2, lambda span=span: self._prepare(job, span))  # type: ignore[misc]
            self.world.at(delay, lambda span=span: self._push(job, allocation, span))  # type: ignore[misc]
        self.world.at(delay + 0.003, lambda: self._finish(job, allocation))
        if self.world.strikes("cancel_source"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def _working(self, job: Job) -> bool:
        return self.alive and job.room in self.allocations and job.room not in self.outcomes

    def _prepare(self, job: Job, span: Span) -> None:
        if self._working(job) and not self.stalled_for:
            self.deliver(Prepare(job.room, span))

    def _push(self, job: Job, allocation: Allocation, span: Span) -> None:
        if self._working(job):
            if self.put_off(lambda: self._push(job, allocation, span)):
                return
            self.memory.compute(allocation, span, states=False)
            self.deliver(Push(job.room, span))

    def _finish(self, job: Job, allocation: Allocation) -> None:
        if self._working(job):
            if self.put_off(lambda: self._finish(job, allocation)):
                return
            self.memory.compute(allocation, Span(0, job.request.num_tokens), states=True)
            self.deliver(Finish(job.room, job.request.num_tokens, job.metadata, job.digest))

    def move(self, action: Action) -> None:
        """Start a write."""
        assert isinstance(action, Write)
        self.wire.write(self, action)

    def submit(self, action: Write) -> Flight:
        """Settle what a write reads and writes."""
        link = self.machine.links[action.note.session]
        assert link.hello is not None
        theirs = {table.group: table.as_page_table() for table in action.tables}
        ours = self.memory.side(self.allocations[action.room].side_tables())
        return Flight(self, action, link.plan, ours, Side(link.hello.pools, theirs))

    def before_release(self, room: Room) -> None:
        """Nothing may still read these pages."""
        for flight in self.wire.flights:
            if flight.source is self and flight.action.room == room:
                self.world.violate("never reuses", f"{self.peer} released pages being read", room)

    def tables(self) -> dict[str, int]:
        """All of a source machine's tables."""
        machine = self.machine
        return super().tables() | {
            "rooms": len(machine.rooms),
            "writes": len(machine.writing),
            "local slots in use": machine.config.local_slots - len(machine.local_slots),
        }


class TargetNode(Node):
    """A decode rank."""

    machine: TargetMachine

    def __init__(
        self, world: World, wire: Wire, peer: Peer, memory: Memory, prefill: Instance
    ) -> None:
        super().__init__(world, wire, peer, memory)
        self.prefill = prefill
        self.stranger = False
        self.on_failure: Callable[[Room], None] = lambda room: None
        self.jobs: dict[Room, Job] = {}

    def begin(self, job: Job, allocation: Allocation) -> None:
        """Ask for the room's cache."""
        self.jobs[job.room] = job
        tables = tuple(Table(name, tuple(pages)) for name, pages in allocation.pages.items())
        due = self.due.get(job.room, self.world.now)
        self.deliver(Receive(job.room, self.prefill, job.request, tables, due, job.digest))
        if self.world.strikes("cancel_target"):
            self.world.at(self.world.rng.random() * 0.2, lambda: self.deliver(Cancel(job.room)))

    def perform(self, action: Action) -> None:
        """Remember which attempt the pages were offered to."""
        if isinstance(action, Send) and isinstance(action.envelope.body, Offer):
            offer = action.envelope.body
            self.allocations[offer.room].generation = offer.generation
        super().perform(action)

    def move(self, action: Action) -> None:
        """Copy a slot into pages, after a while."""
        assert isinstance(action, Scatter)
        delay = 0.001 + self.world.rng.random() * 0.02
        self.world.at(delay, lambda: self._scatter(action))

    def _scatter(self, action: Scatter) -> None:
        if not self.alive:
            return
        if self.put_off(lambda: self._scatter(action)):
            return
        allocation = self.allocations.get(action.room)
        if allocation is None:
            self.world.violate("never reuses", "a scatter into released pages", action.room)
            return
        plan = self.machine.rooms[action.room].plan
        pair = Pair(action.source.rank, self.peer.rank)
        side = self.memory.side(allocation.side_tables())
        pieces = bind(plan, pair, action.request, Image(), side, action.blocks).descriptors()
        self.memory.store(pieces, fetch([self.memory.slots[action.slot]], pieces))
        self.memory.slots[action.slot][:] = 0
        self.deliver(Scattered(action.op))

    def check_landing(self, source: Peer, action: Write) -> None:
        """A write lands: are these bytes still its to write?"""
        allocation = self.allocations.get(action.room)
        if action.slot is None:
            if allocation is None or allocation.generation != action.generation:
                self.world.violate("never reuses", "a write into released pages", action.room)
            return
        book = self.machine.credits
        if action.slot in book.free or action.slot in book.scattering:
            self.world.violate("never reuses", "a write into a slot that is not its", action.room)

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

    def check(self) -> None:
        """The slots too must add up after every step."""
        self.machine.credits.check()

    def tables(self) -> dict[str, int]:
        """All of a target machine's tables."""
        machine = self.machine
        return super().tables() | {
            "rooms": len(machine.rooms),
            "scatters": len(machine.scattering),
            "accounts": len(machine.credits.accounts),
            "slots in use": machine.staging.num_slots - len(machine.credits.free),
        }
