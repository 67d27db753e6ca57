"""The owner: one thread that turns a runner.

Everything that touches the machine happens on this thread: frames from the control
channel, values from other threads through the inbox, and time, in this order. It never
waits for a copy or a transport, copies no more than a few pages, and never calls into an
engine except through the callbacks of a handle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import inf
from typing import Any

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.loop.channels import Channel, Dropped
from kvferry.endpoint.loop.clocks import PeerClocks
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.loop.sides import LoopSide
from kvferry.endpoint.poll_backoff import set_timer_slack
from kvferry.endpoint.runner.runner import MachineRunner
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import ThreadBroke, TransportThread
from kvferry.endpoint.watchdog import WATCHDOG, ThreadHeartbeat, WatchedThreads
from kvferry.errors import Misuse
from kvferry.ids import Peer
from kvferry.protocol.events import Cancel, Event, PeerRuns, Received, Tick
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Heartbeat
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LinkState
from kvferry.telemetry.observer import LoopStatus, Observer

log = logging.getLogger("kvferry.endpoint")

# How often what nobody needs is let go of, while there is anything.
TIDY_S, IDLE_TIDY_S = 0.25, 1.0
# After so many heartbeats that did not come a peer's process is looked at.
QUIET = 2.0
# How long a closing endpoint lets its last words leave.
CLOSE_S = 5.0


class EndpointLoop:
    """A runner with a thread of its own."""

    def __init__(  # noqa: PLR0913 - all that it turns, by keyword
        self,
        runner: MachineRunner[Any, Any],
        role: LoopSide,
        channel: Channel[Any],
        *,
        setup: EndpointSetup,
        rooms: RoomTable[Any],
        inbox: Inbox[object],
        poller: Poller,
        transport_thread: TransportThread,
        copier: Copier,
        observer: Observer,
    ) -> None:
        self.runner = runner
        self.rooms = rooms
        self.me: Peer = runner.machine.me
        self.role = role
        self.channel = channel
        self._inbox = inbox
        self._poller = poller
        self._transport_thread = transport_thread
        self._copier = copier
        self._slots = setup.slots
        self._liveness_port = setup.liveness_port
        self._observer = observer
        self.clocks = PeerClocks(runner.machine, channel.send)
        self._tidy_at = 0.0
        # When this turn began: one time for all that came with it.
        self._now = time.monotonic()
        self._call = self._inbox.fileno()
        for fd in (self._call, self._liveness_port.fileno()):
            self._poller.watch(fd)
        self._heartbeat = ThreadHeartbeat("owner", lambda: len(self._inbox) > 0)
        heartbeats = [self._heartbeat, transport_thread.heartbeat, copier.heartbeat]
        self._watched = WatchedThreads(
            heartbeats, runner.machine.config.stalled_s, self._told_of_stall
        )
        self._closing = False
        self._closed = False
        self._stopped = False
        self._empty = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{self.me}", daemon=True)

    # ------------------------------------------------------------ for any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, item: Event | Callable[[], None]) -> None:
        """Have the machine hear of an event, or this called on the owner's thread. Never waits."""
        self._inbox.put(item)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort what goes on, end the threads, and say whether all memory is free."""
        if self._closed:
            return not len(self.rooms)
        self._closed = True
        self.rooms.shut("this endpoint is closing")
        self.tell(self._begin_close)
        # The wait also ends with a thread that breaks.
        free = self._empty.wait(timeout_s) and not len(self.rooms)
        self.tell(self._stop)
        self._thread.join()
        WATCHDOG.leave(self._watched)
        self._copier.close()
        self._transport_thread.close()
        if free and self.runner.may_leave:
            self._liveness_port.close()
        else:
            # A closed one is proof for others, so it must be true.
            self._liveness_port.leave_open()
        self._inbox.close()
        return free

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        WATCHDOG.watch(self._watched)
        set_timer_slack()
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:
            self._tell_broken("owner", error)
            self.rooms.break_all(f"an internal error stopped this endpoint: {error!r}")
        finally:
            self._stopped = True
            self._heartbeat.beat(inf)
            self.channel.flush()
            self.channel.close()
            self._empty.set()

    def _turn(self) -> None:
        now = time.monotonic()
        until = max(now, self._wakeup(now))
        self._heartbeat.beat(until)
        ready = self._poller.wait(until - now if self._inbox.rest() else 0.0)
        self._inbox.rise(called=self._call in ready)
        now = self._now = time.monotonic()
        self._heartbeat.beat(now)
        self.runner.turn(self._arrived(ready), now)
        for news in self._copier.ended():
            self._dispatch(news)
            # Peers need not wait for the end of a long turn.
            self.channel.let_out()
            self.role.advance(time.monotonic())
        if self._liveness_port.fileno() in ready:
            self._liveness_port.answer()
        self._tidy(now)
        # First what others wait for: launching takes longer.
        self.channel.flush()
        self._copier.launch(urgent=self.role.urgent)
        if self._closing and not len(self.rooms):
            self._empty.set()

    def _arrived(self, ready: set[object]) -> Iterator[Event]:
        """All that has come from other threads and from peers. The runner takes the time after it.

        What is no event goes where it belongs on the way. What an engine asks for as it hears
        of an end is taken too, so that it leaves with what is said of that end.
        """
        for item in chain(self._inbox.drain(), self.channel.receive(ready), self._meanwhile()):
            if isinstance(item, Event):
                if isinstance(item, Received) and isinstance(item.envelope.body, Heartbeat):
                    # Who asks for the time is told.
                    self.clocks.heard(item.envelope, item.envelope.body)
                yield item
                self.rooms.refresh(item, self.runner.machine.status)
            else:
                self._dispatch(item)

    def _meanwhile(self) -> Iterator[object]:
        """Once: who answers every end with another room must not keep the rest waiting."""
        yield from self._inbox.drain()

    def _wakeup(self, now: float) -> float:
        """When to turn again although nothing comes."""
        role = self.role.wakeup(now)
        tidy = self._tidy_at if self._has_something else inf
        copies = now + self._copier.wakeup()
        return min(self.runner.wakeup(), tidy, copies, role)

    @property
    def _has_something(self) -> bool:
        return bool(len(self.rooms) or self.runner.machine.links)

    def _tidy(self, now: float) -> None:
        self.role.advance(now)
        if now >= self._tidy_at:
            self.rooms.refresh(Tick(), self.runner.machine.status)
            self._tidy_at = now + (TIDY_S if len(self.rooms) else IDLE_TIDY_S)
            self.role.tidy()
            self.clocks.ask(self.runner.machine.links.values(), now)
            self._look_at_quiet_peers(now)
            self._observer.status(self._status(now))

    def _look_at_quiet_peers(self, now: float) -> None:
        """A peer that says nothing may be starved, of processors or of its GIL, and still run."""
        machine = self.runner.machine
        quiet_s = QUIET * machine.config.heartbeat_s
        for link in list(machine.links.values()):
            if link.state is LinkState.UP and now > link.heard_at + quiet_s:
                ran_at = self.channel.ran_at(link.peer, link.session, now)
                if ran_at is not None and ran_at > link.heard_at:
                    self.step(PeerRuns(link.session, ran_at))

    def _dispatch(self, item: object) -> None:
        """Take an item of another thread, or of a connection, that is no event."""
        if callable(item):
            item()
        elif isinstance(item, Dropped):
            self.runner.ask_after(partial(_is_with, item.peer))
        elif isinstance(item, ThreadBroke):
            self._thread_broke(item)
        else:
            self.role.hear(item)

    def step(self, event: Event) -> None:
        """Let the machine take a step. A misuse fails its room and nothing else."""
        try:
            self.runner.take(event, self._now)
        except Misuse as error:
            room = getattr(event, "room", None)
            if room is None:
                raise
            failure = Failure.of(FailureCode.INTERNAL, str(error))
            self.runner.take(Cancel(room, failure), self._now)
        self.rooms.refresh(event, self.runner.machine.status)

    def cancel(self, handle: Handle) -> None:
        """Give a room up."""
        if self.rooms.holds(handle) and not self.role.cancel(handle):
            self.step(Cancel(handle.room))

    def _status(self, now: float) -> LoopStatus:
        machine, slots = self.runner.machine, self._slots
        used, total = 0, 0
        if slots is not None:
            pool = slots.pool
            used = (pool.num_slots - self.role.num_free_slots) * pool.slot_bytes
            total = pool.num_bytes
        num_open, num_quarantined = len(self.rooms), machine.num_quarantined
        tables = machine.links.values(), machine.counts
        return LoopStatus(now, num_open, num_quarantined, used, total, *tables)

    # ------------------------------------------------------------ the end

    def _stop(self) -> None:
        self._stopped = True

    def _begin_close(self) -> None:
        self._closing = True
        for handle in self.rooms:
            self.cancel(handle)

    # ------------------------------------------------------------ threads that fail us

    def _thread_broke(self, item: ThreadBroke) -> None:
        """Fail every room with that reason. What the thread had in hand is never released."""
        self._tell_broken(item.thread, item.error)
        why = f"an internal error stopped the {item.thread} of {self.me}: {item.error!r}"
        failure = Failure.of(FailureCode.INTERNAL, f"{why}; restart the process")
        self.rooms.shut(failure.message)
        for handle in self.rooms:
            self.step(Cancel(handle.room, failure))

    def _tell_broken(self, thread: str, error: Exception) -> None:
        log.error("thread-broken endpoint=%s thread=%s", self.me, thread, exc_info=error)
        self._observer.thread_broken(thread)

    def _told_of_stall(self, thread: str, silent_s: float) -> None:
        """On the watchdog's thread: a thread of ours shows no life, or does again."""
        self._observer.thread_stalled(thread, silent_s)
        stalled = self.rooms.stalled
        if not silent_s:
            stalled.pop(thread, None)
            log.warning("thread-recovered endpoint=%s thread=%s", self.me, thread)
            return
        if thread not in stalled:
            log.error(
                "thread-stalled endpoint=%s thread=%s seconds=%.1f", self.me, thread, silent_s
            )
        stalled[thread] = silent_s
        if thread == "owner":
            why = f"the owner thread of {self.me} has shown no life for {silent_s:.0f} s"
            self.rooms.end_overdue(time.monotonic(), why)


def _is_with(peer: Peer | None, link: Link) -> bool:
    return peer in (None, link.peer)
