"""The loop: the thread that runs an endpoint's machine.

Only this thread touches the machine. In each turn it takes items of other threads from the inbox,
frames from the control channel, and then the time. It never waits for a copy or a transport,
copies at most a few pages itself, and calls into the engine only through callbacks of handles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.loop.channels import ConnectionLost
from kvferry.endpoint.loop.clocks import PeerClocks
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.sides import LoopSide
from kvferry.endpoint.poll_backoff import set_timer_slack
from kvferry.endpoint.setup import EndpointSetup
from kvferry.endpoint.transport_thread import ThreadFailed, TransportThread
from kvferry.endpoint.watchdog import WATCHDOG, ThreadHeartbeat, WatchedThreads
from kvferry.ids import Peer
from kvferry.plan.places import page_bytes
from kvferry.protocol.events import Cancel, Event, PeerRuns, Received, Tick
from kvferry.protocol.messages import Heartbeat
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LinkState
from kvferry.telemetry.observer import LoopStatus, Observer, RoomUsage

log = logging.getLogger("kvferry.endpoint")

# Housekeeping intervals: with open rooms, and without.
HOUSEKEEPING_S, IDLE_HOUSEKEEPING_S = 0.25, 1.0
# Missed heartbeats after which a silent peer's process is looked at.
MAX_MISSED_HEARTBEATS = 2.0
# How long a closing endpoint waits for its rooms to be released.
CLOSE_S = 5.0


@dataclass(eq=False, kw_only=True)
class EndpointLoop:
    """Thread that runs one side of an endpoint, and closes its other threads with it."""

    side: LoopSide
    setup: EndpointSetup
    inbox: Inbox
    poller: Poller
    transport_thread: TransportThread
    copier: Copier
    observer: Observer

    def __post_init__(self) -> None:
        self.runner = self.side.runner
        self.rooms = self.side.rooms
        self._channel = self.side.channel
        machine = self.runner.machine
        self.me: Peer = machine.me
        self.clocks = PeerClocks(machine, self._channel.send)
        self._page_bytes = page_bytes(machine.layout, self.me.rank)
        self._housekeeping_at = 0.0
        self._inbox_fd = self.inbox.fileno()
        for fd in (self._inbox_fd, self.setup.liveness_port.fileno()):
            self.poller.watch(fd)
        self._heartbeat = ThreadHeartbeat("loop", lambda: len(self.inbox) > 0)
        heartbeats = [self._heartbeat, self.transport_thread.heartbeat, self.copier.heartbeat]
        self._threads = WatchedThreads(heartbeats, machine.config.stalled_s, self._on_stall)
        self._closing = False
        self._closed = False
        self._stopped = False
        # Set when a closing endpoint has no rooms left, or the thread ends.
        self._empty = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{self.me}", daemon=True)

    # ------------------------------------------------------------ for any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, item: Event | Callable[[], None]) -> None:
        """Let the machine handle an event, or call a function on the loop thread. Never blocks."""
        self.inbox.put(item)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort all rooms, stop the threads, and return whether all memory is free."""
        if self._closed:
            return not len(self.rooms)
        self._closed = True
        self.rooms.refuse_new("this endpoint is closing")
        self.submit(self._begin_close)
        # The wait also ends if a thread fails.
        free = self._empty.wait(timeout_s) and not len(self.rooms)
        self.submit(self._stop)
        self._thread.join()
        WATCHDOG.unwatch(self._threads)
        self.copier.close()
        self.transport_thread.close()
        if free and self.runner.holds_no_memory:
            self.setup.liveness_port.close()
        else:
            # Peers take a closed port for proof that this endpoint touches no memory.
            self.setup.liveness_port.leave_open()
        self.inbox.close()
        return free

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        WATCHDOG.watch(self._threads)
        set_timer_slack()
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:
            self._report_failure("loop", error)
            self.rooms.fail_all(f"an internal error stopped this endpoint: {error!r}")
        finally:
            self._stopped = True
            self._heartbeat.beat(inf)
            self._channel.flush()
            self._channel.close()
            self._empty.set()

    def _turn(self) -> None:
        now = time.monotonic()
        until = max(now, self._wakeup(now))
        self._heartbeat.beat(until)
        ready = self.poller.wait(until - now if self.inbox.prepare_sleep() else 0.0)
        self.inbox.wake(signalled=self._inbox_fd in ready)
        now = time.monotonic()
        self._heartbeat.beat(now)
        self.runner.turn(self._arrived(ready), now)
        for job in self.copier.finished():
            self._dispatch(job)
            # Peers do not have to wait for the end of a long turn.
            self._channel.flush_if_due()
            self.side.poll(time.monotonic())
        if self.setup.liveness_port.fileno() in ready:
            self.setup.liveness_port.answer()
        self.side.poll(now)
        if now >= self._housekeeping_at:
            self._keep_house(now)
        # Send before launching, which takes longer: peers wait for the frames.
        self._channel.flush()
        self.copier.launch(urgent=self.side.urgent)
        if self._closing and not len(self.rooms):
            self._empty.set()

    def _arrived(self, ready: set[object]) -> Iterator[Event]:
        """Yield the events of other threads and peers, and dispatch items that are no events.

        The inbox is drained again after the frames: what an engine's callback asks for at the end
        of a room then leaves with the frames about that end. It is drained only once more, so that
        an engine that answers each end with a room can't starve the rest of the turn.
        """
        drain, receive = self.inbox.drain, partial(self._channel.receive, ready)
        for item in chain.from_iterable(take() for take in (drain, receive, drain)):
            if isinstance(item, Event):
                if isinstance(item, Received) and isinstance(item.envelope.body, Heartbeat):
                    self.clocks.handle(item.envelope, item.envelope.body)
                yield item
                self.rooms.refresh(item, self.runner.machine.status)
            else:
                self._dispatch(item)

    def _wakeup(self, now: float) -> float:
        """Return when the next turn is due if nothing arrives."""
        is_idle = not (len(self.rooms) or self.runner.machine.links)
        return min(
            self.runner.wakeup(),
            inf if is_idle else self._housekeeping_at,
            now + self.copier.wakeup(),
            self.side.wakeup(now),
        )

    def _dispatch(self, item: object) -> None:
        """Handle an item that is no event."""
        if callable(item):
            item()
        elif isinstance(item, ConnectionLost):
            peer = item.peer
            self.runner.probe_links(lambda link: peer in (None, link.peer))
        elif isinstance(item, ThreadFailed):
            self._on_failed_thread(item)
        else:
            self.side.handle_result(item)

    def cancel(self, handle: Handle) -> None:
        """Abort a room."""
        if self.rooms.holds(handle) and not self.side.cancel_waiting(handle):
            self.side.step(Cancel(handle.room))

    def _keep_house(self, now: float) -> None:
        machine = self.runner.machine
        self.rooms.refresh(Tick(), machine.status)
        self._housekeeping_at = now + (HOUSEKEEPING_S if len(self.rooms) else IDLE_HOUSEKEEPING_S)
        self.side.clean_up()
        self.clocks.request(machine.links.values(), now)
        self._check_silent_peers(now)
        self.observer.status(self._status(now))

    def _check_silent_peers(self, now: float) -> None:
        """Tell the machine which silent peers still run: they may lack CPU time or their GIL."""
        machine = self.runner.machine
        silence_s = MAX_MISSED_HEARTBEATS * machine.config.heartbeat_s
        for link in list(machine.links.values()):
            if link.state is LinkState.UP and now > link.heard_at + silence_s:
                ran_at = self._channel.last_ran_at(link.peer, link.session, now)
                if ran_at is not None and ran_at > link.heard_at:
                    self.side.step(PeerRuns(link.session, ran_at))

    def _status(self, now: float) -> LoopStatus:
        machine, slots = self.runner.machine, self.setup.staging
        used_bytes = (slots.num_slots - self.side.num_free_slots) * slots.slot_bytes
        return LoopStatus(
            now,
            len(self.rooms),
            machine.num_quarantined,
            used_bytes,
            self.setup.staging_bytes,
            machine.links.values(),
            machine.counts,
            self.side.num_credits,
            [self._held(handle, now) for handle in self.rooms],
        )

    def _held(self, handle: Handle, now: float) -> RoomUsage:
        counts, sizes = handle.page_counts, self._page_bytes
        num_bytes = sum(count * sizes[group] for group, count in counts.items())
        reason = self.side.waits_for(handle)
        age_s = max(0.0, now - handle.begun)
        num_pages = max(counts.values(), default=0)
        return RoomUsage(age_s, reason, num_pages, handle.held_tokens, num_bytes)

    def _stop(self) -> None:
        self._stopped = True

    def _begin_close(self) -> None:
        self._closing = True
        for handle in self.rooms:
            self.cancel(handle)

    def _on_failed_thread(self, failed: ThreadFailed) -> None:
        """Fail all rooms. Memory of the failed thread's jobs is never released."""
        self._report_failure(failed.thread, failed.error)
        reason = f"an internal error stopped the {failed.thread} thread of {self.me}"
        failure = Failure.of(
            FailureCode.INTERNAL, f"{reason}: {failed.error!r}; restart the process"
        )
        self.rooms.refuse_new(failure.message)
        for handle in self.rooms:
            self.side.step(Cancel(handle.room, failure))

    def _report_failure(self, thread: str, error: Exception) -> None:
        log.error("thread-broken endpoint=%s thread=%s", self.me, thread, exc_info=error)
        self.observer.thread_broken(thread)

    def _on_stall(self, thread: str, overdue_s: float) -> None:
        """Report that a thread is overdue, or has recovered (0). On the watchdog's thread."""
        self.observer.thread_stalled(thread, overdue_s)
        stalled = self.rooms.stalled
        if not overdue_s:
            stalled.pop(thread, None)
            log.warning("thread-recovered endpoint=%s thread=%s", self.me, thread)
            return
        if thread not in stalled:
            log.error(
                "thread-stalled endpoint=%s thread=%s seconds=%.1f", self.me, thread, overdue_s
            )
        stalled[thread] = overdue_s
        if thread == "loop":
            reason = f"the loop thread of {self.me} has stalled for {overdue_s:.0f} s"
            self.rooms.fail_overdue(time.monotonic(), reason)
