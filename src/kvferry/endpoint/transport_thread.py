"""The transport thread: makes all calls to an endpoint's transports, except inline writes.

It receives jobs through a mailbox and passes each result to ``on_result``. A transport that needs
polling is polled from its first link on: often while results are expected, rarely otherwise. The
runner decides which transport a link uses, which sessions may be written to, and what the end of
a write means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from queue import Empty
from typing import NamedTuple

from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.link_costs import Calibration
from kvferry.endpoint.poll_backoff import CORES_TO_SPARE, set_timer_slack
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.ids import Op, Peer, Session
from kvferry.plan.cost import LinkCost
from kvferry.protocol.events import MemoryReached
from kvferry.protocol.messages import TransportOffer
from kvferry.transports.base import RemoteMemory, Transport, WriteEnded
from kvferry.transports.mailbox import Mailbox

log = logging.getLogger("kvferry.endpoint")

# Poll intervals: while a result is expected any moment, while one is expected later, and else.
BUSY_POLL_S = 50e-6 if CORES_TO_SPARE else 250e-6
PATIENT_POLL_S = 1e-3
IDLE_POLL_S = 20e-3
# Jobs run without polling in between for at most this long.
LONG_JOB_S = 1e-3
# For how long after a job or a result the thread polls at the busy interval.
BUSY_S = 20e-3 if CORES_TO_SPARE else 2e-3


class Reached(NamedTuple):
    """A peer's memory can be written to. ``problems`` are of transports tried before this one."""

    session: Session
    transport: Transport
    remote: RemoteMemory
    problems: tuple[str, ...] = ()


class Measured(NamedTuple):
    """The measured cost of a link."""

    session: Session
    link_cost: LinkCost


class ThreadFailed(NamedTuple):
    """An exception has ended a thread of the endpoint. The results of its jobs are lost."""

    thread: str
    error: Exception


TransportResult = WriteJob | Reached | MemoryReached | Measured | ThreadFailed


class TransportThread:
    """Owns the transports from ``start`` to ``close``.

    ``on_result`` is called on this thread and must not wait. ``me`` is the endpoint's id.
    """

    def __init__(
        self,
        transports: Iterable[Transport],
        on_result: Callable[[TransportResult], None],
        me: Peer,
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._on_result = on_result
        self._me = me
        self._jobs: Mailbox[Callable[[], None]] = Mailbox()
        self._remotes: dict[Session, Reached] = {}
        # Sessions whose peers write here by a transport that needs polling to make progress.
        self._incoming: set[Session] = set()
        # Transports that need polling and have had a link.
        self._polled: set[Transport] = set()
        self._problems: dict[Session, str] = {}
        self._cut: set[Session] = set()
        self._writes: dict[Op, WriteJob] = {}
        # Calibration writes in flight, and when each started.
        self._calibrations: dict[Op, tuple[Session, Calibration, LinkCost, float]] = {}
        self._num_calibrations = 0
        self._expects_writes = False
        self._closing = False
        self._busy_at = 0.0
        self.heartbeat = ThreadHeartbeat("transport", lambda: len(self._jobs) > 0)
        for transport in self._transports.values():
            transport.on_completion = self._wake
        name = f"kvferry-transport-{me}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ------------------------------------------------------------ for any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def reach(self, session: Session, offers: Sequence[TransportOffer]) -> None:
        """Connect to a peer's memory by the first offered transport that succeeds."""
        self._jobs.put(lambda: self._reach(session, offers))

    def accept_writes(self, session: Session, transport: str) -> None:
        """Note that a peer writes to this endpoint by that transport."""
        self._jobs.put(lambda: self._accept_writes(session, self._transports[transport]))

    def measure(self, session: Session, calibration: Calibration, before: LinkCost) -> None:
        """Time a few writes to a peer; the result is ``before`` with measured fields."""
        self._jobs.put(lambda: self._measure(session, calibration, before))

    def write(self, job: WriteJob) -> None:
        """Make a write."""
        self._jobs.put(lambda: self._write(job))

    def cut(self, session: Session) -> None:
        """Fail all later writes of a session."""
        self._jobs.put(lambda: self._cut.add(session))

    def forget(self, session: Session) -> None:
        """Disconnect from the peer of a session that has no write in flight."""
        self._jobs.put(lambda: self._forget(session))

    def expect_writes(self, expected: bool, *, soon: bool = False) -> None:
        """Set whether peers may write here, which makes frequent polling worthwhile."""
        self._expects_writes = expected
        if soon and self._incoming and not self._is_busy():
            self._wake()

    def close(self) -> None:
        """Stop the thread and close the transports."""

        def stop() -> None:
            self._closing = True

        self._jobs.put(stop)
        self._thread.join()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        set_timer_slack()
        try:
            while not self._closing:
                self._run_jobs(self._poll_interval())
                if not self._closing:
                    self._poll()
        except Exception as error:
            self._on_result(ThreadFailed("transport", error))
        finally:
            self.heartbeat.beat(inf)
            for transport in self._transports.values():
                transport.close()

    def _wake(self) -> None:
        """Wake the transport thread to poll. It polls after every job anyway."""
        if threading.current_thread() is not self._thread:
            self._jobs.put(lambda: None)

    def _poll_interval(self) -> float | None:
        """Seconds until the next poll; None to wait for a job."""
        if not self._polled:
            return None
        expects_writes = self._expects_writes and self._incoming
        if not (self._writes or self._calibrations or expects_writes):
            return IDLE_POLL_S
        if any(transport.poll_again for transport in self._polled):
            return 0.0
        return BUSY_POLL_S if self._is_busy() else PATIENT_POLL_S

    def _is_busy(self) -> bool:
        return time.monotonic() - self._busy_at < BUSY_S

    def _run_jobs(self, timeout_s: float | None) -> None:
        self.heartbeat.beat(inf if timeout_s is None else time.monotonic() + timeout_s)
        try:
            job = self._jobs.get(timeout_s)
            self._busy_at = time.monotonic()
            self.heartbeat.beat(self._busy_at)
            job()
            # Poll after a long job, so that its result does not wait for the next job.
            while time.monotonic() - self._busy_at < LONG_JOB_S:
                job = self._jobs.get_now()
                job()
        except Empty:
            return

    def _poll(self) -> None:
        """Take all results. Taking some may let a transport produce more."""
        for transport in self._transports.values():
            if transport.needs_polling and transport not in self._polled:
                continue
            while ended := transport.poll():
                for each in ended:
                    self._write_ended(each)
                self._busy_at = time.monotonic()

    def _reach(self, session: Session, offers: Sequence[TransportOffer]) -> None:
        problems: list[str] = []
        for offer in offers:
            transport = self._transports[offer.name]
            try:
                remote = transport.connect(offer.payload)
            except KvferryError as error:
                problems.append(f"{offer.name}: {error}")
                continue
            if transport.needs_polling:
                self._polled.add(transport)
            reached = Reached(session, transport, remote, tuple(problems))
            self._remotes[session] = reached
            self._on_result(reached)
            return
        self._problems[session] = text = "; ".join(problems)
        log.warning("not-connected endpoint=%s session=%s error=%s", self._me, session, text)
        self._on_result(MemoryReached(session, "", tuple(problems)))

    def _accept_writes(self, session: Session, transport: Transport) -> None:
        if transport.needs_polling:
            self._incoming.add(session)
            self._polled.add(transport)

    def _forget(self, session: Session) -> None:
        self._cut.discard(session)
        self._incoming.discard(session)
        self._problems.pop(session, None)
        reached = self._remotes.pop(session, None)
        if reached is not None:
            reached.transport.disconnect(reached.remote)

    def _write(self, job: WriteJob) -> None:
        reached = self._remotes.get(job.session)
        if reached is None or job.session in self._cut:
            job.fail(self._problems.get(job.session, "the session is over"))
            self._on_result(job)
            return
        self._writes[job.op] = job
        job.start(reached.transport)
        job.describe(reached.transport)
        reached.transport.write(reached.remote, job.op, job.binding)

    def _write_ended(self, ended: WriteEnded) -> None:
        if ended.op in self._calibrations:
            self._calibration_ended(ended)
            return
        job = self._writes.pop(ended.op, None)
        if job is not None:
            job.end(ended)
            self._on_result(job)
        else:
            log.error("write-ended-twice op=%d fate=%s", ended.op, ended.fate)

    def _measure(self, session: Session, calibration: Calibration, before: LinkCost) -> None:
        """Start the next calibration write. Scratch memory needs no proof that it has ended."""
        reached, binding = self._remotes.get(session), calibration.next()
        if reached is None or session in self._cut or binding is None:
            return
        # The machine's operations have positive numbers, so negative ones are free.
        self._num_calibrations += 1
        op = Op(-self._num_calibrations)
        self._calibrations[op] = session, calibration, before, time.monotonic()
        reached.transport.write(reached.remote, op, binding)

    def _calibration_ended(self, ended: WriteEnded) -> None:
        session, calibration, before, started = self._calibrations.pop(ended.op)
        if ended.fate is not None:
            return
        calibration.record(time.monotonic() - started)
        if calibration.next() is None:
            self._on_result(Measured(session, calibration.link_cost(before)))
        else:
            self._measure(session, calibration, before)
