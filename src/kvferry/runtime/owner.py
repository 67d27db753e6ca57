"""The owner: one thread that has a machine and carries out what it says.

Everything that touches the machine happens on this thread: frames from the
control channel, calls from other threads through the inbox, and time. It never
copies, never waits for a transport, and never calls into an engine except
through the callbacks of a handle.

Frames are taken before time is: whoever was stopped for a while must hear what
others said meanwhile before it concludes that they were silent.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvferry.errors import InputError, KvferryError, Misuse
from kvferry.ids import MAX_ID, MAX_NAME, Peer, Room, Session
from kvferry.plan.choose import Constants
from kvferry.protocol.codec import BadFrame, FrameFault, decode
from kvferry.protocol.endpoint import Endpoint, Link
from kvferry.protocol.events import (
    Action,
    Cancel,
    Disconnect,
    Event,
    Received,
    Release,
    Report,
    Send,
    Tick,
    WrongVersion,
)
from kvferry.protocol.messages import RoomMessage
from kvferry.protocol.outcome import Failure, FailureCode, Outcome, Status
from kvferry.protocol.states import LinkState
from kvferry.runtime.bundles import unbundle
from kvferry.runtime.card import Card
from kvferry.runtime.control import ZmqSocket
from kvferry.runtime.copier import Copier
from kvferry.runtime.handles import Handle
from kvferry.runtime.inbox import Inbox
from kvferry.runtime.lifeline import Lifeline
from kvferry.runtime.metrics import Meter, Stats
from kvferry.runtime.mover import Ending, Mover
from kvferry.runtime.poller import Poller
from kvferry.runtime.proofs import Prober
from kvferry.runtime.pulse import WATCHMAN, Patient, Pulse

log = logging.getLogger("kvferry.runtime")

H = TypeVar("H", bound=Handle)
IDLE_TICK_S = 0.5
# How long a closing endpoint lets its last words leave.
CLOSE_S = 5.0


def new_incarnation() -> int:
    """A random id for one life of an endpoint."""
    return secrets.randbelow(MAX_ID) + 1


class Parts(NamedTuple):
    """What an owner is made of, beside its control channel."""

    machine: Endpoint
    inbox: Inbox
    lifeline: Lifeline
    mover: Mover
    copier: Copier
    meter: Meter
    tick_s: float
    stalled_s: float
    staging_bytes: int


class Owner(ABC, Generic[H]):
    """A machine with a thread of its own."""

    def __init__(self, parts: Parts) -> None:
        self.machine = parts.machine
        self.me = parts.machine.me
        self._inbox = parts.inbox
        self._lifeline = parts.lifeline
        self.lifeline_address = parts.lifeline.address
        self._mover = parts.mover
        self._copier = parts.copier
        self._meter = parts.meter
        self._tick_s = parts.tick_s
        # Without rooms there are only heartbeats.
        heartbeat_s = parts.machine.config.heartbeat_s
        self._idle_tick_s = max(parts.tick_s, min(IDLE_TICK_S, heartbeat_s / 4))
        self.staging_bytes = parts.staging_bytes
        self._tick_at = 0.0
        self._handles: dict[Room, H] = {}
        self._lock = threading.Lock()
        self._prober = Prober(self.told_gone, f"kvferry-prober-{self.me}")
        self._poller = Poller()
        for fd in (self._inbox, self._lifeline):
            self._poller.watch(fd.fileno())
        self._pulse = Pulse("owner", lambda: len(self._inbox) > 0)
        pulses = [self._pulse, self._mover.pulse, self._copier.pulse]
        self._patient = Patient(pulses, parts.stalled_s, self._told_of_stall)
        # Threads that show no life, and for how long.
        self._stalled: dict[str, float] = {}
        self._closing = False
        self._stopped = False
        self._broken = ""
        self._empty = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{self.me}", daemon=True)

    # ------------------------------------------------------------ for any thread

    @property
    def stats(self) -> Stats:
        """Counts since the start."""
        return self._meter.stats

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Where rooms stand; None for those whose memory was released long ago."""
        handles = self._handles
        found = (handles.get(room) for room in rooms)
        return [handle.status if handle else None for handle in found]

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort what goes on, end the threads, and say whether all memory is free."""
        if self._stopped:
            return not self._handles
        self._inbox.put(self._begin_close)
        # The wait also ends with a thread that breaks.
        free = self._empty.wait(timeout_s) and not self._broken
        self._inbox.put(self._stop)
        self._thread.join()
        WATCHMAN.leave(self._patient)
        self._prober.close()
        self._copier.close()
        self._mover.close()
        if free:
            self._lifeline.close()
        else:
            # A closed one is proof for others, so it must be true.
            self._lifeline.leave_open()
        self._inbox.close()
        self._meter.close()
        return free

    def _add(self, handle: H) -> None:
        """Take a room on. Raises ``Misuse``, and ``InputError`` for what is no room's id."""
        _demand_room(handle.room)
        with self._lock:
            if self._broken or self._closing:
                why = self._broken or "this endpoint is closing"
                raise Misuse(f"room {handle.room!r} can't begin: {why}")
            if handle.room in self._handles:
                raise Misuse(f"room {handle.room!r} is open already; use another id")
            self._handles[handle.room] = handle

    def _abort(self, handle: H) -> None:
        self._inbox.put(partial(self._cancel, handle))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        WATCHMAN.watch(self._patient)
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:
            log.exception("thread-broken endpoint=%s thread=%s", self.me, "owner")
            self._meter.broke("owner")
            self._break(f"an internal error stopped this endpoint: {error!r}")
        finally:
            self._stopped = True
            self._flush()
            self._shut()
            self._empty.set()

    def _turn(self) -> None:
        now = time.monotonic()
        until = max(now, self._pause_until())
        self._pulse.beat(until)
        ready = self._poller.wait(until - now)
        self._pulse.beat(time.monotonic())
        for call in self._inbox.drain():
            call()
        self._take_frames(ready)
        if self._lifeline.fileno() in ready:
            self._lifeline.answer()
        now = time.monotonic()
        if self._handles:
            # A room may have begun since the last tick, which was for none.
            self._tick_at = min(self._tick_at, now + self._tick_s)
        if now >= self._tick_at:
            self._tick(now)
        self._flush()

    def _pause_until(self) -> float:
        """When the owner must look again although nothing came."""
        return self._tick_at

    def _tick(self, now: float) -> None:
        self._tick_at = now + (self._tick_s if self._handles else self._idle_tick_s)
        self._step(Tick())
        self._prober.keep(self._is_suspect)
        self._measure_now(now)

    def _step(self, event: Event) -> None:
        """Let the machine take a step, and carry out what it says."""
        for action in self.machine.handle(event, time.monotonic()):
            self._perform(action)
        self._refresh(event)
        if self._closing and not self._handles:
            self._empty.set()

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._send_or_fail(action)
            case Disconnect():
                self._disconnect(action)
            case Report(room=room, outcome=outcome):
                self._report(room, outcome)
            case Release(room=room):
                self._release(room)
            case _:
                self._move(action)

    def _send_or_fail(self, action: Send) -> None:
        try:
            self._send(action)
        except KvferryError as error:
            # A frame that can't be made concerns one room, and fails that room alone.
            log.warning("unsendable endpoint=%s peer=%s error=%s", self.me, action.peer, error)
            self._meter.refused("unsendable")
            body = action.envelope.body
            if isinstance(body, RoomMessage):
                self._inbox.put(partial(self._step, Cancel(body.room)))

    def _report(self, room: Room, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            outcome = _with_stalls(outcome, self._stalled)
        self._meter.ended(outcome)
        handle = self._handles.get(room)
        if isinstance(outcome, Failure):
            log.warning(
                "room-failed endpoint=%s room=%r code=%s reason=%r",
                *(self.me, room, outcome.code, outcome.message),
            )
        if handle:
            self._ended(handle, outcome)
            handle.end(outcome)

    def _ended(self, handle: H, outcome: Outcome) -> None:
        """A last look at a room before its caller hears of its end."""

    def _release(self, room: Room) -> None:
        handle = self._handles.pop(room, None)
        if handle:
            handle.release()

    def _cancel(self, handle: H) -> None:
        if self._handles.get(handle.room) is handle:
            self._step(Cancel(handle.room))

    # ------------------------------------------------------------ frames

    def _take_message(self, message: bytes, route: bytes = b"") -> None:
        """A message came from the control channel."""
        frames = unbundle(message)
        if frames is None:
            self._meter.refused("frame-foreign")
        for frame in frames or ():
            self._take(frame, route)

    def _take(self, frame: bytes, route: bytes = b"") -> None:
        """A frame came; an answer to it would go along ``route``."""
        message = decode(frame)
        if not isinstance(message, BadFrame):
            self._routed(message.session, route)
            self._step(Received(message))
            return
        self._meter.refused(f"frame-{message.fault}")
        header = message.header
        if message.fault is FrameFault.VERSION and header is not None:
            self._routed(header.session, route)
            answered = header.seq == 0
            self._step(WrongVersion(header.sender, header.session, header.version, answered))

    def _routed(self, session: Session, route: bytes) -> None:
        """A session was spoken in along that route."""

    def _watch(self, sockets: Iterable[ZmqSocket]) -> None:
        for one in sockets:
            self._poller.watch(one)

    def _unwatch(self, sockets: Iterable[ZmqSocket]) -> None:
        for one in sockets:
            self._poller.unwatch(one)

    # ------------------------------------------------------------ status

    def _refresh(self, event: Event) -> None:
        """Bring the handles of the rooms that a step was about up to date."""
        body = event.envelope.body if isinstance(event, Received) else event
        room = getattr(body, "room", None)
        handles: Iterable[H | None] = ()
        if room is not None:
            handles = (self._handles.get(room),)
        elif isinstance(event, Received | Tick):
            # About a peer, so about many rooms. A copy, made at once: others add rooms meanwhile.
            handles = tuple(self._handles.values())
        for handle in handles:
            if handle is not None and handle.outcome is None:
                status = self._status(handle.room)
                handle.status = handle.status if status is None else status

    @abstractmethod
    def _status(self, room: Room) -> Status | None:
        """Where the machine sees a room."""

    def _measure_now(self, now: float) -> None:
        up = [link for link in self.machine.links.values() if link.state is LinkState.UP]
        age_s = max((now - link.heard_at for link in up), default=0.0)
        quarantined = self._num_quarantined()
        self._meter.now(open_rooms=len(self._handles), quarantined=quarantined, age_s=age_s)
        for what in ("refused", "impatient", "misdirected", "other-incarnation"):
            self._meter.total(what, self.machine.counts[what])

    @abstractmethod
    def _num_quarantined(self) -> int:
        """Failed rooms that wait for proof."""

    # ------------------------------------------------------------ proof

    def told_gone(self, peer: Peer, incarnation: int) -> None:
        """On any thread: somebody knows that this life of a peer is over."""
        self._inbox.put(partial(self._gone, peer, incarnation))

    @abstractmethod
    def _gone(self, peer: Peer, incarnation: int) -> None:
        """That life of a peer is over."""

    @abstractmethod
    def _is_suspect(self, suspect: tuple[Peer, int]) -> bool:
        """Whether something still waits for proof that a peer is gone."""

    @abstractmethod
    def _disconnect(self, action: Disconnect) -> None:
        """Tear a session down."""

    def _ask_after(self, peers: Callable[[Link], bool] = lambda _: True) -> None:
        """There was a sign that some peer may be gone: ask, rather than wait for its silence."""
        for link in self.machine.links.values():
            address = Card.address_in(link.metadata)
            if link.incarnation is not None and address and peers(link):
                self._prober.sign(link.peer, link.incarnation, address)

    # ------------------------------------------------------------ what the mover says

    def write_ended(self, ending: Ending) -> None:
        """On the mover's thread."""
        self._inbox.put(partial(self._write_ended, ending))

    def note_came(self, frame: bytes) -> None:
        """On the mover's thread."""
        self._inbox.put(partial(self._take, frame))

    def session_cut(self, session: Session) -> None:
        """On the mover's thread."""
        self._inbox.put(partial(self._session_cut, session))

    def not_connected(self, session: Session, problem: str) -> None:
        """On the mover's thread. Writes to that peer fail with the same words."""
        log.warning("not-connected endpoint=%s session=%s problem=%s", self.me, session, problem)

    def measured(self, constants: Constants) -> None:
        """On the mover's thread."""
        self._inbox.put(partial(self._measured, constants))

    def _write_ended(self, ending: Ending) -> None:
        """A write has ended."""

    def _session_cut(self, session: Session) -> None:
        """Nothing of a session is in flight."""

    def _measured(self, constants: Constants) -> None:
        """The transport was measured."""

    # ------------------------------------------------------------ threads that fail us

    def thread_broke(self, thread: str, error: Exception) -> None:
        """On the thread that breaks: it has ended of a bug."""
        log.error("thread-broken endpoint=%s thread=%s", self.me, thread, exc_info=error)
        self._inbox.put(partial(self._thread_broke, thread, error))

    def _thread_broke(self, thread: str, error: Exception) -> None:
        """Fail every room with that reason. What the thread had in hand is never released."""
        self._meter.broke(thread)
        why = f"an internal error stopped the {thread} of {self.me}: {error!r}; restart the process"
        with self._lock:
            self._broken = why
        failure = Failure.of(FailureCode.INTERNAL, why)
        for room in list(self._handles):
            self._step(Cancel(room, failure))

    def _told_of_stall(self, thread: str, silent_s: float) -> None:
        """On the watchman's thread: a thread of ours shows no life, or does again."""
        self._meter.stalled(thread, silent_s)
        if not silent_s:
            self._stalled.pop(thread, None)
            log.warning("thread-alive endpoint=%s thread=%s", self.me, thread)
            return
        if thread not in self._stalled:
            log.error("thread-stalled endpoint=%s thread=%s for_s=%.1f", self.me, thread, silent_s)
        self._stalled[thread] = silent_s
        if thread == "owner":
            self._end_in_its_place(silent_s)

    def _end_in_its_place(self, silent_s: float) -> None:
        """Nobody waits longer than a deadline, not even for an owner that hangs."""
        why = f"the owner thread of {self.me} has shown no life for {silent_s:.0f} s"
        now = time.monotonic()
        for handle in list(self._handles.values()):
            if now >= handle.deadline:
                handle.end(Failure.of(FailureCode.INTERNAL, why))

    # ------------------------------------------------------------ each side's own

    @abstractmethod
    def _take_frames(self, ready: set[object]) -> None:
        """Take what the control channel has, if it is ready."""

    @abstractmethod
    def _send(self, action: Send) -> None:
        """Have a frame sent at the end of this turn. It may be lost."""

    @abstractmethod
    def _flush(self) -> None:
        """Send what this turn had to say."""

    @abstractmethod
    def _move(self, action: Action) -> None:
        """Carry out a write or a scatter."""

    @abstractmethod
    def _shut(self) -> None:
        """Close the control channel."""

    # ------------------------------------------------------------ the end

    def _begin_close(self) -> None:
        with self._lock:
            self._closing = True
        for handle in list(self._handles.values()):
            self._cancel(handle)
        if not self._handles:
            self._empty.set()

    def _stop(self) -> None:
        self._stopped = True

    def _break(self, why: str) -> None:
        """A bug of ours: nobody may wait for ever because of it. No memory is released."""
        with self._lock:
            self._broken = why
            handles = list(self._handles.values())
        for handle in handles:
            handle.end(Failure.of(FailureCode.INTERNAL, why))


def _with_stalls(failure: Failure, stalled: Mapping[str, float]) -> Failure:
    """A hang of ours must not look like a slow peer."""
    if not stalled:
        return failure
    ours = " and ".join(f"the {thread} thread for {s:.0f} s" for thread, s in stalled.items())
    return Failure.of(failure.code, f"{failure.message}; no life here of {ours}")


def _demand_room(room: Room) -> None:
    """What no frame could carry would never be answered."""
    try:
        msgspec.convert(room, Room)
    except msgspec.ValidationError:
        raise InputError(
            f"a room's id is a whole number from 0 to {MAX_ID} or 1 to {MAX_NAME} characters, "
            f"not {room!r:.300}"
        ) from None
