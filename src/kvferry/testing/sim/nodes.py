"""Nodes of the simulated world: processes that run a machine, and can be stopped and killed.

``Node`` implements the runner's ports except the peers port, which is ``SimPeers``. The engines
that use a node, one for each side, are in ``engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import Any

from kvferry.endpoint.runner.runner import MachineRunner, frame_event
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Op, Peer, Room, Session
from kvferry.protocol.codec import BadFrame
from kvferry.protocol.events import (
    Cancel,
    Event,
    LookUp,
    Prove,
    Proven,
    Release,
    Report,
    Send,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Failure, FailureCode, Outcome
from kvferry.testing.sim.checks import NodeChecks
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.memory import SimAllocation, SimMemory
from kvferry.testing.sim.wire import RETRY_S, Wire
from kvferry.testing.sim.world import World

# How long a node probes after a hint of death, and how long an endpoint takes to close.
HINT_S = 0.5
LEAVE_S = 0.3

Action = Callable[[], None]


class SimProcess:
    """One process. ``catch_up`` receives the actions that were deferred while it was stopped."""

    def __init__(self, world: World, catch_up: Callable[[list[Action]], None]) -> None:
        self._world = world
        self._catch_up = catch_up
        self.alive = True
        self.has_left = False
        self._stalled_until = 0.0
        self._stopped_s = 0.0
        self._deferred: list[Action] = []

    @property
    def stalled_for(self) -> float:
        """Seconds until the process continues; 0 if it runs."""
        return max(0.0, self._stalled_until - self._world.now)

    @property
    def ran_s(self) -> float:
        """Seconds that the process has run, without those in which it was stopped."""
        return self._world.now - self._stopped_s + self.stalled_for

    @property
    def is_serving(self) -> bool:
        """Whether the process runs and its endpoint is open."""
        return self.alive and not self.has_left and not self.stalled_for

    def stall(self, seconds: float) -> None:
        """Stop the process (SIGSTOP), and continue it (SIGCONT) after these seconds."""
        until = max(self._stalled_until, self._world.now + seconds)
        self._stopped_s += until - max(self._stalled_until, self._world.now)
        self._stalled_until = until
        self._world.at(seconds, self._resume)

    def wake(self) -> None:
        """Continue the process now if it is stopped."""
        self._stopped_s -= self.stalled_for
        self._stalled_until = 0.0
        self._resume()

    def _resume(self) -> None:
        if self.stalled_for > 1e-9 or not self.alive:
            return
        self._stalled_until = 0.0
        deferred, self._deferred = self._deferred, []
        self._catch_up(deferred)

    def defer(self, action: Action) -> bool:
        """Defer the action if the process is stopped, in order; return whether it was deferred."""
        if self.stalled_for:
            self._deferred.append(action)
        return self.stalled_for > 0


class SimPeers:
    """The peers port: the incarnations that a node probes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self.probes: set[tuple[Peer, int]] = set()

    def start_probing(self, record: SessionRecord) -> None:
        """Probe a peer until it is proven dead or the node stops."""
        self._world.record(self._node.peer, ">", f"probes {record.peer}")
        if record.life not in self.probes:
            self.probes.add(record.life)
            self._world.at(RETRY_S, lambda: self._node.wire.probe(self._node, record.life))

    def stop_probing(self, record: SessionRecord) -> None:
        """Stop probing an incarnation."""
        self.probes.discard(record.life)

    def hint_death(self, record: SessionRecord) -> None:
        """Probe an incarnation for a short while, after a hint that it may be dead."""
        event = self._node.checks.current_event
        if isinstance(event, WriteEnded) and event.fate is WriteFate.BUSY:
            self._world.violate("never hangs", f"{self._node.peer} takes back-pressure for death")
        node, until = self._node, self._world.now + HINT_S
        self._world.at(0.01, lambda: node.wire.probe(node, record.life, until=until))


class SimProofs:
    """The sums of rooms' pages that a node computes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: dict[Op, Prove] = {}

    def begin(self, action: Prove) -> None:
        """Answer after a while."""
        self._under_way[action.op] = action
        world = self._node.world
        world.at(0.001 + world.rng.random() * 0.02, lambda: self._end(action))

    def reads(self, room: Room) -> bool:
        """Whether a room's pages are being read."""
        return any(action.room == room for action in self._under_way.values())

    def _end(self, action: Prove) -> None:
        node = self._node
        if not node.process.alive or node.process.defer(lambda: self._end(action)):
            return
        allocation = node.allocations.get(action.room)
        if allocation is None:
            node.world.violate("never reuses", "a proof of released pages", action.room)
            return
        del self._under_way[action.op]
        node.deliver(Proven(action.op, node.memory.sums(action, allocation)))


class Node(ABC):
    """One process with its runner and its memory."""

    runner: MachineRunner[Any, Any]

    def __init__(self, world: World, wire: Wire, peer: Peer, memory: SimMemory) -> None:
        self.world = world
        self.wire = wire
        self.peer = peer
        self.memory = memory
        self.process = SimProcess(world, self._catch_up)
        self.checks = NodeChecks(self)
        self.peers = SimPeers(self)
        self.outcomes: dict[Room, Outcome] = {}
        self.allocations: dict[Room, SimAllocation] = {}
        self.due: dict[Room, float] = {}
        self.proofs = SimProofs(self)
        self._tick_at: float | None = None
        # Events collected while a process catches up, for one turn.
        self._batch: list[Event] | None = None

    @property
    def machine(self) -> Any:
        """The machine that the runner drives."""
        return self.runner.machine

    @property
    def incarnation(self) -> int:
        """The machine's incarnation."""
        incarnation: int = self.runner.machine.incarnation
        return incarnation

    # ------------------------------------------------------------ turns

    def arrive(self, message: Envelope | BadFrame) -> None:
        """Deliver a decoded frame, and count it if it is refused."""
        if isinstance(message, BadFrame):
            self.world.counts[f"refused-{message.fault}"] += 1
        event = frame_event(message)
        if event is not None:
            self.deliver(event)

    def deliver(self, event: Event) -> None:
        """Give an event to the runner, now or when the process continues."""
        if not self.process.alive or self.process.has_left:
            return
        if self._batch is not None:
            self._batch.append(event)
            return
        if self.process.stalled_for:
            self.checks.add_unread(event)
        if not self.process.defer(lambda: self.deliver(event)):
            self._turn([event])

    def _turn(self, events: list[Event]) -> None:
        self.world.steps += 1
        self.runner.turn(self.checks.track(events), self.world.now)
        self.checks.check()
        self.check_step()
        self._schedule_tick()

    def _catch_up(self, deferred: list[Action]) -> None:
        """Handle everything that was deferred in one turn, in order."""
        self._batch = []
        for action in deferred:
            action()
        events, self._batch = self._batch, None
        if not self.process.has_left:
            self._turn(events)
        self.checks.clear_unread()

    def _schedule_tick(self) -> None:
        wakeup = self.runner.wakeup()
        if wakeup == inf or (self._tick_at is not None and self._tick_at <= wakeup):
            return
        self._tick_at = wakeup
        # At least a millisecond, so that a timer in the past cannot stop the clock.
        self.world.at(max(1e-3, wakeup - self.world.now), lambda: self._tick(wakeup))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # An earlier tick has replaced this one.
        self._tick_at = None
        if self.process.is_serving:
            self._turn([])

    # ------------------------------------------------------------ ports

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send a frame."""
        self.world.record(self.peer, ">", Send(peer, envelope))
        self.world.send(self.peer, peer, envelope)

    def forget(self, session: Session) -> None:
        """Count a session that is forgotten while a write of it may still land."""
        if any(flight.session == session and flight.source is self for flight in self.wire.flights):
            self.world.counts["forgotten-in-doubt"] += 1

    def report(self, action: Report) -> None:
        """Record how a room ended, and check it."""
        room, outcome = action.room, action.outcome
        self.world.record(self.peer, ">", action)
        if room in self.outcomes:
            self.world.violate("never hangs", f"{self.peer} reported twice", room)
        self.outcomes[room] = outcome
        self.due.pop(room, None)
        if isinstance(outcome, Failure) and outcome.code is FailureCode.PEER_SILENT:
            self.checks.check_silence(room, outcome)
        self.check_outcome(room, outcome)

    def look_up(self, action: LookUp) -> None:
        """Let the engine look up what it holds; only sources have it."""
        raise AssertionError(action)

    def check_step(self) -> None:  # noqa: B027
        """Check the engine's side after a step."""

    def check_outcome(self, room: Room, outcome: Outcome) -> None:  # noqa: B027
        """Check how a room ended."""

    def release(self, room: Room) -> None:
        """Give a room's pages back to the engine, which may use them at once."""
        self.world.record(self.peer, ">", Release(room))
        allocation = self.allocations.pop(room, None)
        if allocation is None or room not in self.outcomes:
            self.world.violate("never leaks", f"{self.peer} released a room not reported", room)
            return
        if self.proofs.reads(room):
            self.world.violate("never reuses", f"{self.peer} released pages being proven", room)
        self.check_release(room)
        self.memory.release(allocation)

    def check_release(self, room: Room) -> None:  # noqa: B027
        """Check that a room's memory may be released."""

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages after a while."""
        self.world.record(self.peer, ">", action)
        self.proofs.begin(action)

    # ------------------------------------------------------------ engine

    def leave(self) -> None:
        """Cancel every room and close the endpoint soon after; the process lives on."""
        for room in list(self.due):
            self.deliver(Cancel(room))
        self.world.at(LEAVE_S, self._close)

    def _close(self) -> None:
        """Close the endpoint if its memory is free: to others, the end is proof of that."""
        process = self.process
        process.has_left = process.alive and not process.stalled_for and self.runner.holds_no_memory

    def start(self, job: SimJob) -> None:
        """Start a job as soon as there are pages for it."""
        if not self.process.stalled_for:
            self._start_when_pages_are_free(job, self.world.now + job.deadline_s)

    def _start_when_pages_are_free(self, job: SimJob, until: float) -> None:
        # A job without pages when the faults stop is dropped, so that probes get pages.
        too_late = self.world.now > until or (self.world.calm and not job.probe)
        if too_late or not self.process.alive:
            return
        if self.process.defer(lambda: self._start_when_pages_are_free(job, until)):
            return
        allocation = self.memory.allocate(job.number, job.request)
        if allocation is None:
            self.world.counts["pool-full"] += 1
            self.world.at(0.05, lambda: self._start_when_pages_are_free(job, until))
            return
        self.start_in(job, allocation)

    def pin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Start a job whose pages are cached here. If the process is stopped, it starts later."""
        if not self.process.alive:
            return
        if not self.process.defer(lambda: self.pin(job, allocation)):
            self.start_in(job, allocation)

    def start_in(self, job: SimJob, allocation: SimAllocation) -> None:
        """Start a job in these pages."""
        self.allocations[job.room] = allocation
        self.due[job.room] = self.world.now + job.deadline_s
        self.begin(job, allocation)

    @abstractmethod
    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Give the job to the machine; its pages are allocated."""
