"""Nodes of the simulated world: processes with a driver, stopped and killed as it pleases.

To its driver a node is all the ports. What engines do on either side is in ``engines``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from kvferry.ids import Peer, Room, Session
from kvferry.protocol.codec import BadFrame
from kvferry.protocol.events import (
    Cancel,
    Event,
    Fate,
    Received,
    Release,
    Report,
    Send,
    SendFailed,
)
from kvferry.protocol.messages import Envelope
from kvferry.protocol.outcome import Failure, FailureCode, Outcome
from kvferry.protocol.states import LinkState
from kvferry.runtime.driver.driver import Driver, frame_event
from kvferry.runtime.driver.sessions import Record
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.memory import Allocation, SimMemory
from kvferry.testing.sim.wire import RETRY_S, Wire
from kvferry.testing.sim.world import World

# How long a sign of death is followed, and how long an endpoint takes to close.
SIGN_S = 0.5
LEAVE_S = 0.3
NOBODY = Peer("nobody", 0)


class Node(ABC):
    """One process, alive, stopped or dead; to its driver, all the ports."""

    driver: Driver[Any, Any]

    def __init__(self, world: World, wire: Wire, peer: Peer, memory: SimMemory) -> None:
        self.world = world
        self.wire = wire
        self.peer = peer
        self.memory = memory
        self.alive = True
        self.has_left = False
        self.stalled_until = 0.0
        self.outcomes: dict[Room, Outcome] = {}
        self.allocations: dict[Room, Allocation] = {}
        self.due: dict[Room, float] = {}
        self.suspects: set[tuple[Peer, int]] = set()
        self._tick_at: float | None = None
        self._backlog: list[Callable[[], None]] = []
        self._together: list[Event] | None = None
        self._unread: Counter[Peer] = Counter()
        self._taking: Event | None = None
        # How long the process was stopped in all; how long it had run when it last heard from
        # each peer, and when that was.
        self._stopped_s = 0.0
        self._heard_after: dict[Peer, tuple[float, float]] = {}

    @property
    def machine(self) -> Any:
        """The machine that is driven."""
        return self.driver.machine

    @property
    def incarnation(self) -> int:
        """The machine's id of this life."""
        incarnation: int = self.driver.machine.incarnation
        return incarnation

    @property
    def stalled_for(self) -> float:
        """Seconds until the process goes on; 0 if it runs."""
        return max(0.0, self.stalled_until - self.world.now)

    @property
    def ran_s(self) -> float:
        """Seconds that the process has run, without those in which it was stopped."""
        return self.world.now - self._stopped_s + self.stalled_for

    # ------------------------------------------------------------ steps

    def arrive(self, message: Envelope | BadFrame) -> None:
        """A frame came."""
        if isinstance(message, BadFrame):
            self.world.happened[f"refused-{message.fault}"] += 1
        event = frame_event(message)
        if event is not None:
            self.deliver(event)

    def deliver(self, event: Event) -> None:
        """Let the driver take what has come, and the time."""
        if not self.alive or self.has_left:
            return
        if self._together is not None:
            self._together.append(event)
            return
        if self.stalled_for:
            self._unread[_sender(event)] += 1
        if self.put_off(lambda: self.deliver(event)):
            return
        self._turn([event])

    def _turn(self, events: list[Event]) -> None:
        self.world.steps += 1
        self.driver.turn(self._remembered(events), self.world.now)
        self.machine.check()
        self._check_deadlines()
        self._check_sleep()
        self._schedule_tick()

    def _remembered(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            self.world.remember(self.peer, "<", event)
            self._heard_after[_sender(event)] = self.ran_s, self.world.now
            self._taking = event
            yield event
            self._unread[_sender(event)] -= 1
            self._taking = None

    def _schedule_tick(self) -> None:
        wakeup = self.driver.wakeup()
        if wakeup == inf or (self._tick_at is not None and self._tick_at <= wakeup):
            return
        self._tick_at = wakeup
        # Never at once: a machine that asks for the past must not stop the clock.
        self.world.at(max(1e-3, wakeup - self.world.now), lambda: self._tick(wakeup))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return  # an earlier one was planned meanwhile
        self._tick_at = None
        if self.alive and not self.has_left and not self.stalled_for:
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

    def suspect(self, record: Record) -> None:
        """Ask after a peer until it is gone or acquitted."""
        self.world.remember(self.peer, ">", f"suspects {record.peer}")
        if record.life not in self.suspects:
            self.suspects.add(record.life)
            self.world.at(RETRY_S, lambda: self.wire.ask(self, record.life))

    def acquit(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof."""
        self.suspects.discard((peer, incarnation))

    def sign(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """Ask after a peer for a while."""
        if isinstance(self._taking, SendFailed) and self._taking.fate is Fate.BUSY:
            self.world.violate("never hangs", f"{self.peer} takes back-pressure for death")
        until = self.world.now + SIGN_S
        self.world.at(0.01, lambda: self.wire.ask(self, (peer, incarnation), until=until))

    def report(self, room: Room, outcome: Outcome) -> None:
        """An engine hears how a room ended, once."""
        self.world.remember(self.peer, ">", Report(room, outcome))
        if room in self.outcomes:
            self.world.violate("never hangs", f"{self.peer} reported twice", room)
        self.outcomes[room] = outcome
        self.due.pop(room, None)
        if isinstance(outcome, Failure) and outcome.code is FailureCode.PEER_SILENT:
            self._demand_silence(room, outcome)
        self.reported(room, outcome)

    def _demand_silence(self, room: Room, failure: Failure) -> None:
        """Silence counts only once all words are read, and only while this process runs."""
        words = failure.message.split()
        for peer, count in self._unread.items():
            if count > 0 and str(peer) in words:
                text = f"{self.peer} takes {peer} for silent with its words unread"
                self.world.violate("never hangs", text, room)
        times = self.machine.config
        # A process can't tell when it was stopped between two heartbeats.
        limit_s = times.silence_s - times.heartbeat_s
        for peer, (ran_s, heard_at) in self._heard_after.items():
            if str(peer) not in words or self.machine.current.get(peer) is not None:
                continue  # another one's judgement
            silent_s = self.ran_s - ran_s
            if silent_s < limit_s <= self.world.now - heard_at:
                text = f"{self.peer} takes {peer} for silent after running for {silent_s:.2f} s"
                self.world.violate("never hangs", text, room)

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

    def _check_sleep(self) -> None:
        """Nothing else wakes a driver that sleeps past a timer of its machine."""
        wakeup = self.machine.wakeup()
        if wakeup is not None:
            late = self.driver.wakeup() - max(wakeup, self.world.now)
            if late > self.machine.config.resend_s / 4 + 1e-9:
                self.world.violate("never hangs", f"{self.peer} sleeps past its machine's timer")

    def _check_deadlines(self) -> None:
        """A process that was stopped learns the time with its next turn, like any other."""
        for room, due in self.due.items():
            if self.world.now > due + 3e-3 and room not in self.outcomes:
                self.world.violate("never hangs", f"{self.peer} is past its deadline", room)

    # ------------------------------------------------------------ life and death

    def stall(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        until = max(self.stalled_until, self.world.now + seconds)
        self._stopped_s += until - max(self.stalled_until, self.world.now)
        self.stalled_until = until
        self.world.at(seconds, self.resume)

    def wake(self) -> None:
        """SIGCONT now, if it is stopped."""
        self._stopped_s -= self.stalled_for
        self.stalled_until = 0.0
        self.resume()

    def resume(self) -> None:
        """Go on, with everything that came meanwhile, in its order, and then the time."""
        if self.stalled_for > 1e-9 or not self.alive:
            return
        self.stalled_until = 0.0
        backlog, self._backlog = self._backlog, []
        self._together = []
        for then in backlog:
            then()
        events, self._together = self._together, None
        if not self.has_left:
            self._turn(events)
        self._unread.clear()

    def put_off(self, then: Callable[[], None]) -> bool:
        """Whether the process is stopped; if so, it does that when it goes on, in order."""
        if self.stalled_for:
            self._backlog.append(then)
        return self.stalled_for > 0

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.wire.bury(self)

    def leave(self) -> None:
        """Give every room up, and close the endpoint soon after; the process lives on."""
        for room in list(self.due):
            self.deliver(Cancel(room))
        self.world.at(LEAVE_S, self._close)

    def _close(self) -> None:
        """A closed lifeline is proof for others, so it closes only when all memory is free."""
        self.has_left = self.alive and not self.stalled_for and self.driver.may_leave

    def leftovers(self) -> list[str]:
        """What a machine and an engine still hold when nothing is going on."""
        names = [f"room {room!r}" for room in [*self.allocations, *self.due]]
        return names + [f"{key}: {value}" for key, value in self.tables().items() if value]

    def tables(self) -> dict[str, int]:
        """Sizes of the machine's tables, all 0 when nothing is going on."""
        lost = [link for link in self.machine.links.values() if link.state is LinkState.LOST]
        return {
            "lost links": len(lost),
            "writes in flight": self.driver.sessions.num_flying,
            "dead sessions": len(self.driver.sessions) - len(self.machine.links),
            "suspects": len(self.suspects),
        }

    def _too_late(self, job: SimJob) -> bool:
        """Whoever still waits for pages when the faults stop gives up: probes come next."""
        return self.world.calm and not job.probe

    def _start_when_pages_are_free(self, job: SimJob, until: float) -> None:
        if not self.alive or self.world.now > until or self._too_late(job):
            return
        if self.put_off(lambda: self._start_when_pages_are_free(job, until)):
            return
        allocation = self.memory.allocate(job.number, job.request)
        if allocation is None:
            self.world.happened["pool-full"] += 1
            self.world.at(0.05, lambda: self._start_when_pages_are_free(job, until))
            return
        self.take_on(job, allocation)

    def take_on(self, job: SimJob, allocation: Allocation) -> None:
        """Begin a job in these pages."""
        self.allocations[job.room] = allocation
        self.due[job.room] = self.world.now + job.deadline_s
        self.begin(job, allocation)

    @abstractmethod
    def begin(self, job: SimJob, allocation: Allocation) -> None:
        """Pages are held: tell the machine."""

    def start(self, job: SimJob) -> None:
        """Take on a job as soon as there are pages for it."""
        if not self.stalled_for:
            self._start_when_pages_are_free(job, self.world.now + job.deadline_s)


def _sender(event: Event) -> Peer:
    return event.envelope.sender if isinstance(event, Received) else NOBODY
