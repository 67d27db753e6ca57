"""The transport_thread: the thread of an endpoint's transports.

It calls everything of them but what makes a write at once, which is the owner's. It is handed
writes and tells how they ended. A transport that must be polled is polled from
its first link on, often while something is expected and rarely otherwise; one that need not
be costs nothing while it is idle. It decides nothing: which transports a link may have, which
sessions may be written to, and what the end of a write means, is the runner's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from queue import Empty
from typing import NamedTuple

from kvferry.endpoint.calibration import Calibration
from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.poll_backoff import CORES_TO_SPARE, set_timer_slack
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.ids import Op, Session
from kvferry.plan.cost import LinkCost
from kvferry.protocol.messages import TransportOffer
from kvferry.transports.base import RemoteMemory, Transport, WriteEnded
from kvferry.transports.mailbox import Mailbox

log = logging.getLogger("kvferry.endpoint")

# How often to look while something is about to happen.
BUSY_POLL_S = 50e-6 if CORES_TO_SPARE else 250e-6
PATIENT_POLL_S = 1e-3
IDLE_POLL_S = 20e-3
LONG_JOB_S = 1e-3
# After so long without news, the end of a write is not about to come any moment.
EAGER_S = 20e-3 if CORES_TO_SPARE else 2e-3


class Reached(NamedTuple):
    """A peer's memory can be written to; ``problems`` of better transports that were tried."""

    session: Session
    transport: Transport
    remote: RemoteMemory
    problems: tuple[str, ...] = ()


class Unreached(NamedTuple):
    """A peer's memory can't be reached, and why, for each transport that was tried."""

    session: Session
    problems: tuple[str, ...]


class Measured(NamedTuple):
    """What a link costs."""

    session: Session
    link_cost: LinkCost


class ThreadBroke(NamedTuple):
    """A bug has ended a thread, and nothing that it had in hand will be told of."""

    thread: str
    error: Exception


# What the owner hears. Told on the transport_thread's thread; whoever listens must not wait.
TransportResult = WriteJob | Reached | Unreached | Measured | ThreadBroke


class TransportThread:
    """Owns transports from ``start`` to ``close``."""

    def __init__(
        self, transports: Iterable[Transport], tell: Callable[[TransportResult], None], name: str
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._tell = tell
        self._jobs: Mailbox[Callable[[], None]] = Mailbox()
        self._remotes: dict[Session, tuple[Transport, RemoteMemory]] = {}
        # Sessions whose peers write here, by a transport that must be polled for that.
        self._written: set[Session] = set()
        # Those that have had a link, and must be polled.
        self._polled: set[Transport] = set()
        self._problems: dict[Session, str] = {}
        self._cut: set[Session] = set()
        self._flights: dict[Op, WriteJob] = {}
        # Writes of its own, and when each began.
        self._calibrations: dict[Op, tuple[Session, Calibration, LinkCost, float]] = {}
        self._own_ops = 0
        self._expecting = False
        self._closing = False
        self._news_at = 0.0
        self.heartbeat = ThreadHeartbeat("transport_thread", lambda: len(self._jobs) > 0)
        for transport in self._transports.values():
            transport.on_completion = self._nudge
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def reach(self, session: Session, offers: Sequence[TransportOffer]) -> None:
        """Reach the memory of a session's peer by the first of these that can."""
        self._jobs.put(lambda: self._reach(session, offers))

    def let_write(self, session: Session, transport: str) -> None:
        """The peer of a session writes here by that transport."""
        self._jobs.put(lambda: self._let_write(session, self._transports[transport]))

    def measure(self, session: Session, calibration: Calibration, before: LinkCost) -> None:
        """Time a few writes to the peer of a session."""
        self._jobs.put(lambda: self._measure(session, calibration, before))

    def write(self, job: WriteJob) -> None:
        """Make a write."""
        self._jobs.put(lambda: self._write(job))

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start: what waits here fails."""
        self._jobs.put(lambda: self._cut.add(session))

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight: let its peer's memory go."""
        self._jobs.put(lambda: self._forget(session))

    def expect(self, expecting: bool, *, soon: bool = False) -> None:
        """Whether peers may write here, so that helping them along is worth a little time."""
        self._expecting = expecting
        if soon and self._written and not self._is_eager():
            self._nudge()

    def close(self) -> None:
        """End the thread and give the transports back."""

        def stop() -> None:
            self._closing = True

        self._jobs.put(stop)
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        set_timer_slack()
        try:
            while not self._closing:
                self._work(self._pause())
                if not self._closing:
                    self._poll()
        except Exception as error:
            self._tell(ThreadBroke("transport_thread", error))
        finally:
            self.heartbeat.beat(inf)
            for transport in self._transports.values():
                transport.close()

    def _nudge(self) -> None:
        """Wake the transport thread to poll. It polls after every job anyway."""
        if threading.current_thread() is not self._thread:
            self._jobs.put(lambda: None)

    def _pause(self) -> float | None:
        """How long there is nothing to do; None until something is asked."""
        if not self._polled:
            return None
        if not (self._flights or self._calibrations or (self._expecting and self._written)):
            return IDLE_POLL_S
        return BUSY_POLL_S if self._is_eager() else PATIENT_POLL_S

    def _is_eager(self) -> bool:
        return time.monotonic() - self._news_at < EAGER_S

    def _work(self, pause_s: float | None) -> None:
        self.heartbeat.beat(inf if pause_s is None else time.monotonic() + pause_s)
        try:
            job = self._jobs.get(pause_s)
            self._news_at = time.monotonic()
            self.heartbeat.beat(self._news_at)
            job()
            # Whoever waits for the end of a long write must not wait for the next one too.
            while time.monotonic() - self._news_at < LONG_JOB_S:
                job = self._jobs.get_now()
                job()
        except Empty:
            return

    def _poll(self) -> None:
        """Take all ends. Taking some may be what lets the next come."""
        for transport in self._transports.values():
            if transport.needs_polling and transport not in self._polled:
                continue
            while ended := transport.poll():
                for each in ended:
                    self._end(each)
                self._news_at = time.monotonic()

    # ------------------------------------------------------------ peers

    def _reach(self, session: Session, offers: Sequence[TransportOffer]) -> None:
        problems: list[str] = []
        for offer in offers:
            transport = self._transports[offer.name]
            try:
                remote = transport.connect(offer.payload)
            except KvferryError as error:
                problems.append(f"{offer.name}: {error}")
                continue
            self._remotes[session] = transport, remote
            if transport.needs_polling:
                self._polled.add(transport)
            self._tell(Reached(session, transport, remote, tuple(problems)))
            return
        self._problems[session] = "; ".join(problems)
        self._tell(Unreached(session, tuple(problems)))

    def _let_write(self, session: Session, transport: Transport) -> None:
        if transport.needs_polling:
            self._written.add(session)
            self._polled.add(transport)

    def _forget(self, session: Session) -> None:
        self._cut.discard(session)
        self._written.discard(session)
        self._problems.pop(session, None)
        reached = self._remotes.pop(session, None)
        if reached is not None:
            transport, remote = reached
            transport.disconnect(remote)

    # ------------------------------------------------------------ writes

    def _write(self, job: WriteJob) -> None:
        reached = self._remotes.get(job.session)
        if reached is None or job.session in self._cut:
            job.fail(self._problems.get(job.session, "the session is over"))
            self._tell(job)
            return
        transport, remote = reached
        self._flights[job.op] = job
        binding = job.start(transport)
        job.describe(binding)
        transport.write(remote, job.op, binding)

    def _end(self, ended: WriteEnded) -> None:
        if ended.op in self._calibrations:
            self._calibration_ended(ended)
            return
        job = self._flights.pop(ended.op, None)
        if job is not None:
            job.end(ended)
            self._tell(job)
        else:
            log.error("write-ended-twice op=%d fate=%s", ended.op, ended.fate)

    # ------------------------------------------------------------ measuring

    def _measure(self, session: Session, calibration: Calibration, before: LinkCost) -> None:
        """Into scratch memory that is nobody's, so nobody waits for these ends."""
        reached, binding = self._remotes.get(session), calibration.next()
        if reached is None or session in self._cut or binding is None:
            return
        transport, remote = reached
        # A number below zero, where no write of the machine's is.
        self._own_ops -= 1
        op = Op(self._own_ops)
        self._calibrations[op] = session, calibration, before, time.monotonic()
        transport.write(remote, op, binding)

    def _calibration_ended(self, ended: WriteEnded) -> None:
        session, calibration, before, started = self._calibrations.pop(ended.op)
        if ended.fate is not None:
            return
        calibration.took(time.monotonic() - started)
        if calibration.next() is None:
            self._tell(Measured(session, calibration.link_cost(before)))
        else:
            self._measure(session, calibration, before)
