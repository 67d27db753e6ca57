"""The mover: the one thread that touches a transport.

The owner hands it writes and hears how they ended. A transport that must be
polled is polled often while something is expected and rarely otherwise; one that
need not be costs nothing while it is idle.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from queue import Empty
from typing import NamedTuple, Protocol

from kvferry.errors import KvferryError
from kvferry.ids import Op, Session
from kvferry.mailbox import Mailbox
from kvferry.plan.bind import Binding
from kvferry.plan.choose import Constants, Path
from kvferry.protocol.events import Fate
from kvferry.runtime.gauge import Gauge
from kvferry.runtime.pulse import Pulse
from kvferry.transport.base import Ended, Remote, Transport

log = logging.getLogger("kvferry.runtime")

# Those that this process may use, which in a container or under taskset are not all.
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
_CORES_TO_SPARE = (_NUM_CORES or 1) >= 8
# How often to look while something is about to happen: polling costs a core that may be needed.
BUSY_POLL_S = 50e-6 if _CORES_TO_SPARE else 250e-6
PATIENT_POLL_S = 1e-3
IDLE_POLL_S = 20e-3
LONG_JOB_S = 1e-3
# After so long without news, a write or a note is not about to come any moment.
EAGER_S = 20e-3 if _CORES_TO_SPARE else 2e-3


class Posting(NamedTuple):
    """A write to make. ``path`` is None where the binding tells whether it is runs or slices."""

    op: Op
    session: Session
    bind: Callable[[], Binding]
    note: bytes
    path: Path | None = None


class Ending(NamedTuple):
    """How a write went, and what it was."""

    op: Op
    fate: Fate | None
    detail: str = ""
    path: Path = Path.SLICES
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0


class MoverListener(Protocol):
    """Who hears what the mover has to say. Called on the mover's thread; must not wait."""

    def write_ended(self, ending: Ending) -> None:
        """A write has ended, or its fate is unknown."""

    def note_came(self, frame: bytes) -> None:
        """An arrival note came with its data."""

    def session_cut(self, session: Session) -> None:
        """Nothing of that session is in flight, and nothing will be."""

    def not_connected(self, session: Session, problem: str) -> None:
        """The peer's memory can't be reached."""

    def measured(self, constants: Constants) -> None:
        """The transport costs this."""

    def thread_broke(self, thread: str, error: Exception) -> None:
        """A bug: the thread has ended, and nothing that it had in hand will be told of."""


@dataclass(slots=True)
class _Peer:
    """A session as the mover knows it."""

    remote: Remote | None = None
    problem: str = ""
    flying: set[Op] = field(default_factory=set)
    doubtful: bool = False
    cut: bool = False


class _Flight(NamedTuple):
    session: Session
    started: float
    path: Path
    num_bytes: int
    num_pieces: int


class Mover:
    """Owns a transport from ``start`` to ``close``."""

    def __init__(self, transport: Transport, listener: MoverListener, name: str) -> None:
        self.transport = transport
        self._listener = listener
        self._jobs: Mailbox[Callable[[], None]] = Mailbox()
        self._peers: dict[Session, _Peer] = {}
        self._flights: dict[Op, _Flight] = {}
        self._gauges: dict[Op, tuple[Gauge, Constants]] = {}
        self._own_ops = 0
        self._expecting = False
        self._closing = False
        self._news_at = 0.0
        self.pulse = Pulse("mover", lambda: len(self._jobs) > 0)
        transport.on_news = self._nudge
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def connect(self, session: Session, metadata: bytes) -> None:
        """Reach the peer of a session."""
        self._jobs.put(lambda: self._connect(session, metadata))

    def measure(self, session: Session, gauge: Gauge, before: Constants) -> None:
        """Time a few writes to the peer of a session."""
        self._jobs.put(lambda: self._measure(session, gauge, before))

    def write(self, posting: Posting) -> None:
        """Make a write."""
        self._jobs.put(lambda: self._write(posting))

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start, and say when nothing is in flight."""
        self._jobs.put(lambda: self._cut(session))

    def bury(self, session: Session) -> None:
        """The peer's process is gone: its doubtful writes are over too."""
        self._jobs.put(lambda: self._bury(session))

    def expect(self, expecting: bool, *, soon: bool = False) -> None:
        """Whether notes may come, so that waiting for them is worth a little time."""
        self._expecting = expecting
        if soon and self.transport.needs_polling and not self._is_eager():
            self._nudge()

    def close(self) -> None:
        """End the thread and give the transport back."""
        self._jobs.put(self._close)
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take(self._pause())
                if not self._closing:
                    self._poll()
        except Exception as error:
            self._listener.thread_broke("mover", error)
        finally:
            self.pulse.beat(inf)
            self.transport.close()

    def _close(self) -> None:
        self._closing = True

    def _nudge(self) -> None:
        self._jobs.put(lambda: None)

    def _pause(self) -> float | None:
        """How long there is nothing to do; None until something is asked."""
        if not self.transport.needs_polling:
            return None
        if not (self._flights or self._gauges or self._expecting):
            return IDLE_POLL_S
        return BUSY_POLL_S if self._is_eager() else PATIENT_POLL_S

    def _is_eager(self) -> bool:
        return time.monotonic() - self._news_at < EAGER_S

    def _take(self, pause_s: float | None) -> None:
        self.pulse.beat(inf if pause_s is None else time.monotonic() + pause_s)
        try:
            job = self._jobs.take(pause_s)
            self._news_at = time.monotonic()
            self.pulse.beat(self._news_at)
            job()
            # Whoever waits for the end of a long write must not wait for the next one too.
            while time.monotonic() - self._news_at < LONG_JOB_S:
                job = self._jobs.take_now()
                job()
        except Empty:
            return

    def _poll(self) -> None:
        """Take all news. Taking some may be what lets the next come."""
        while True:
            news = self.transport.poll()
            for note in news.notes:
                self._listener.note_came(note)
            for ended in news.ended:
                self._end(ended)
            if not (news.notes or news.ended):
                return
            # After a note the next is as far away as a slot takes to be filled; or there are
            # many, and then one look finds several.
            if news.ended:
                self._news_at = time.monotonic()

    # ------------------------------------------------------------ peers

    def _connect(self, session: Session, metadata: bytes) -> None:
        peer = self._peers.setdefault(session, _Peer())
        if peer.cut or peer.remote is not None:
            return
        try:
            peer.remote = self.transport.connect(metadata)
        except KvferryError as error:
            peer.problem = str(error)
            self._listener.not_connected(session, peer.problem)

    def _cut(self, session: Session) -> None:
        self._peers.setdefault(session, _Peer()).cut = True
        self._let_go(session)

    def _bury(self, session: Session) -> None:
        peer = self._peers.setdefault(session, _Peer())
        peer.cut, peer.doubtful = True, False
        self._let_go(session)

    def _let_go(self, session: Session) -> None:
        """Forget a session that is cut once nothing of it can be in flight."""
        peer = self._peers[session]
        if not peer.cut or peer.flying or peer.doubtful:
            return
        del self._peers[session]
        if peer.remote is not None:
            self.transport.disconnect(peer.remote)
        self._listener.session_cut(session)

    # ------------------------------------------------------------ writes

    def _write(self, posting: Posting) -> None:
        peer = self._peers.get(posting.session)
        if peer is None or peer.cut or peer.remote is None:
            problem = peer.problem if peer and peer.problem else "the session is over"
            self._listener.write_ended(Ending(posting.op, Fate.FAILED, problem))
            return
        try:
            binding = posting.bind()
        except KvferryError as error:
            self._listener.write_ended(Ending(posting.op, Fate.FAILED, str(error)))
            return
        direct = Path.RUNS if binding.contiguous else Path.SLICES
        if not self.transport.maps_peer and posting.path is None:
            binding = binding.merged()
        flight = _Flight(
            posting.session,
            time.monotonic(),
            posting.path or direct,
            binding.num_bytes,
            binding.num_pieces,
        )
        peer.flying.add(posting.op)
        self._flights[posting.op] = flight
        self.transport.write(peer.remote, posting.op, binding, posting.note)

    def _end(self, ended: Ended) -> None:
        if ended.op in self._gauges:
            self._gauge_ended(ended)
            return
        flight = self._flights.pop(ended.op, None)
        if flight is None:
            log.error("write-ended-twice op=%d fate=%s", ended.op, ended.fate)
            return
        peer = self._peers[flight.session]
        peer.flying.discard(ended.op)
        if ended.fate is Fate.UNKNOWN:
            peer.doubtful = True
        seconds = time.monotonic() - flight.started
        self._listener.write_ended(
            Ending(
                ended.op,
                ended.fate,
                ended.detail,
                flight.path,
                flight.num_bytes,
                flight.num_pieces,
                seconds,
            )
        )
        self._let_go(flight.session)

    def _own_op(self) -> Op:
        """A number below zero, where no write of the machine's is."""
        self._own_ops -= 1
        return Op(self._own_ops)

    # ------------------------------------------------------------ measuring

    def _measure(self, session: Session, gauge: Gauge, before: Constants) -> None:
        peer, binding = self._peers.get(session), gauge.next()
        if peer is None or peer.cut or peer.remote is None or binding is None:
            return
        op = self._own_op()
        peer.flying.add(op)
        self._flights[op] = _Flight(session, time.monotonic(), Path.SLICES, 0, 0)
        self._gauges[op] = gauge, before
        self.transport.write(peer.remote, op, binding, None)

    def _gauge_ended(self, ended: Ended) -> None:
        gauge, before = self._gauges.pop(ended.op)
        flight = self._flights.pop(ended.op)
        peer = self._peers[flight.session]
        peer.flying.discard(ended.op)
        peer.doubtful |= ended.fate is Fate.UNKNOWN
        if ended.fate is None:
            gauge.took(time.monotonic() - flight.started)
            if gauge.next() is None:
                self._listener.measured(gauge.constants(before))
            else:
                self._measure(flight.session, gauge, before)
        self._let_go(flight.session)
