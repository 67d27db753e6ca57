"""Nodes of the simulated world: processes with a runner, stopped and killed as it pleases.

A node holds its process (``process``), the promises that it keeps (``promises``) and the peers
that it asks after. What engines do on either side is in ``engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import Any

from kvferry.endpoint.runner.runner import MachineRunner, frame_event
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.codec import BadFrame
from kvferry.protocol.events import (
    Cancel,
    Event,
    Release,
    Report,
    Send,
    SendFailed,
    WriteFate,
)
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Failure, FailureCode, Outcome
from kvferry.protocol.states import LinkState
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.memory import SimAllocation, SimMemory
from kvferry.testing.sim.process import SimProcess, Step
from kvferry.testing.sim.promises import Promises
from kvferry.testing.sim.wire import RETRY_S, Wire
from kvferry.testing.sim.world import World

# How long a sign of death is followed, and how long an endpoint takes to close.
SIGN_S = 0.5
LEAVE_S = 0.3


class SimPeers:
    """The peers that a node asks after."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._world = node.world
        self.probes: set[tuple[Peer, int]] = set()

    def start_probing(self, record: SessionRecord) -> None:
        """Ask after a peer until it is gone or acquitted."""
        self._world.remember(self._node.peer, ">", f"probes {record.peer}")
        if record.life not in self.probes:
            self.probes.add(record.life)
            self._world.at(RETRY_S, lambda: self._node.wire.ask(self._node, record.life))

    def stop_probing(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof."""
        self.probes.discard((peer, incarnation))

    def hint_death(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """Ask after a peer for a while."""
        taking = self._node.promises.taking
        if isinstance(taking, SendFailed) and taking.fate is WriteFate.BUSY:
            self._world.violate("never hangs", f"{self._node.peer} takes back-pressure for death")
        node, until = self._node, self._world.now + SIGN_S
        self._world.at(0.01, lambda: node.wire.ask(node, (peer, incarnation), until=until))


class Node(ABC):
    """One process with its runner, to which it is all the ports but ``peers``."""

    runner: MachineRunner[Any, Any]

    def __init__(self, world: World, wire: Wire, peer: Peer, memory: SimMemory) -> None:
        self.world = world
        self.wire = wire
        self.peer = peer
        self.memory = memory
        self.process = SimProcess(world, self._catch_up)
        self.promises = Promises(self)
        self.peers = SimPeers(self)
        self.outcomes: dict[Room, Outcome] = {}
        self.allocations: dict[Room, SimAllocation] = {}
        self.due: dict[Room, float] = {}
        self._tick_at: float | None = None
        self._together: list[Event] | None = None

    @property
    def machine(self) -> Any:
        """The machine that is driven."""
        return self.runner.machine

    @property
    def incarnation(self) -> int:
        """The machine's id of this life."""
        incarnation: int = self.runner.machine.incarnation
        return incarnation

    # ------------------------------------------------------------ steps

    def arrive(self, message: Envelope | BadFrame) -> None:
        """A frame came."""
        if isinstance(message, BadFrame):
            self.world.happened[f"refused-{message.fault}"] += 1
        event = frame_event(message)
        if event is not None:
            self.deliver(event)

    def deliver(self, event: Event) -> None:
        """Let the runner take what has come, and the time."""
        if not self.process.alive or self.process.has_left:
            return
        if self._together is not None:
            self._together.append(event)
            return
        if self.process.stalled_for:
            self.promises.came(event)
        if self.process.put_off(lambda: self.deliver(event)):
            return
        self._turn([event])

    def _turn(self, events: list[Event]) -> None:
        self.world.steps += 1
        self.runner.turn(self.promises.reading(events), self.world.now)
        self.promises.check()
        self._schedule_tick()

    def _catch_up(self, backlog: list[Step]) -> None:
        """Go on, with everything that came meanwhile, in its order, and then the time."""
        self._together = []
        for then in backlog:
            then()
        events, self._together = self._together, None
        if not self.process.has_left:
            self._turn(events)
        self.promises.caught_up()

    def _schedule_tick(self) -> None:
        wakeup = self.runner.wakeup()
        if wakeup == inf or (self._tick_at is not None and self._tick_at <= wakeup):
            return
        self._tick_at = wakeup
        # Never at once: a machine that asks for the past must not stop the clock.
        self.world.at(max(1e-3, wakeup - self.world.now), lambda: self._tick(wakeup))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # an earlier one was planned meanwhile
        self._tick_at = None
        if self.process.serves:
            self._turn([])

    # ------------------------------------------------------------ ports

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Put a frame on the wire."""
        self.world.remember(self.peer, ">", Send(peer, envelope))
        self.world.send(self.peer, peer, envelope)

    def forget(self, session: Session) -> None:
        """Nothing is kept of a session here."""
        if any(flight.session == session and flight.source is self for flight in self.wire.flights):
            self.world.happened["forgotten-in-doubt"] += 1

    def report(self, room: Room, outcome: Outcome) -> None:
        """An engine hears how a room ended, once."""
        self.world.remember(self.peer, ">", Report(room, outcome))
        if room in self.outcomes:
            self.world.violate("never hangs", f"{self.peer} reported twice", room)
        self.outcomes[room] = outcome
        self.due.pop(room, None)
        if isinstance(outcome, Failure) and outcome.code is FailureCode.PEER_SILENT:
            self.promises.demand_silence(room, outcome)
        self.reported(room, outcome)

    def reported(self, room: Room, outcome: Outcome) -> None:  # noqa: B027
        """The engine hears how a room ended."""

    def release(self, room: Room) -> None:
        """An engine has its pages back, and uses them again."""
        self.world.remember(self.peer, ">", Release(room))
        allocation = self.allocations.pop(room, None)
        if allocation is None or room not in self.outcomes:
            self.world.violate("never leaks", f"{self.peer} released a room not reported", room)
            return
        self.before_release(room)
        self.memory.release(allocation)

    def before_release(self, room: Room) -> None:  # noqa: B027
        """A last look at memory that is about to be reused."""

    # ------------------------------------------------------------ work

    def leave(self) -> None:
        """Give every room up, and close the endpoint soon after; the process lives on."""
        for room in list(self.due):
            self.deliver(Cancel(room))
        self.world.at(LEAVE_S, self._close)

    def _close(self) -> None:
        """A closed liveness_port is proof for others, so it closes only when all memory is free."""
        process = self.process
        process.has_left = process.alive and not process.stalled_for and self.runner.holds_no_memory

    def tables(self) -> dict[str, int]:
        """Sizes of the machine's tables, all 0 when nothing is going on."""
        lost = [link for link in self.machine.links.values() if link.state is LinkState.LOST]
        return {
            "lost links": len(lost),
            "writes in flight": self.runner.sessions.num_in_flight,
            "dead sessions": len(self.runner.sessions) - len(self.machine.links),
            "probes": len(self.peers.probes),
        }

    def _start_when_pages_are_free(self, job: SimJob, until: float) -> None:
        # Whoever still waits for pages when the faults stop gives up: probes come next.
        too_late = self.world.now > until or (self.world.calm and not job.probe)
        if too_late or not self.process.alive:
            return
        if self.process.put_off(lambda: self._start_when_pages_are_free(job, until)):
            return
        allocation = self.memory.allocate(job.number, job.request)
        if allocation is None:
            self.world.happened["pool-full"] += 1
            self.world.at(0.05, lambda: self._start_when_pages_are_free(job, until))
            return
        self.take_on(job, allocation)

    def take_on(self, job: SimJob, allocation: SimAllocation) -> None:
        """Begin a job in these pages."""
        self.allocations[job.room] = allocation
        self.due[job.room] = self.world.now + job.deadline_s
        self.begin(job, allocation)

    @abstractmethod
    def begin(self, job: SimJob, allocation: SimAllocation) -> None:
        """Pages are held: tell the machine."""

    def start(self, job: SimJob) -> None:
        """Take on a job as soon as there are pages for it."""
        if not self.process.stalled_for:
            self._start_when_pages_are_free(job, self.world.now + job.deadline_s)
