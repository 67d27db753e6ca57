"""The runner: feeds events to a machine, and passes the machine's actions to its ports.

What a port answers at once is the next event. The runner also tracks which sessions have writes
in flight (``sessions``), and so when a session that was given up is proven to be over.

In each turn, frames and results come before time: after a pause, the machine must see what peers
sent meanwhile before it may conclude that they were silent. If a turn comes late, the runner
tells the machine by how much, so that only time in which this process ran counts as silence.

No thread, clock or socket. Endpoints, simulator and explorer use this class with their own ports;
``testing/sim`` has versions of it that break a rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvferry.endpoint.runner.sessions import SessionRecord, Sessions
from kvferry.ids import Op, Peer, Room, Session
from kvferry.protocol.codec import BadFrame, FrameFault
from kvferry.protocol.events import (
    Action,
    Choose,
    Connect,
    Discard,
    Disconnect,
    Disconnected,
    Event,
    Forget,
    Gather,
    LookUp,
    Open,
    OwnStall,
    Post,
    Prove,
    Receive,
    Received,
    Release,
    Report,
    Scatter,
    Send,
    Tick,
    Write,
    WriteEnded,
    WriteFate,
    WrongVersion,
)
from kvferry.protocol.links import Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import MAX_BLOCKS, Accept, Arrived, Close, Envelope, RoomMessage
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.target import TargetMachine

# A turn that is late by less than this part of a heartbeat is not reported as a stall.
MIN_STALL = 1 / 32

M = TypeVar("M", bound=Machine)

# Events with which an engine opens a room.
OPENING = (Open, Receive)

# Frames that may wait for the end of a long turn. More are sent in the middle of it.
MAX_WAITING_FRAMES = 16


class PeerGone(Event, frozen=True):
    """Proof that an incarnation of a peer is dead: its process reads and writes nothing."""

    peer: Peer
    incarnation: int


class ControlPort(Protocol):
    """Sends frames."""

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Send a frame. It may be lost."""


class DataPort(Protocol):
    """Sessions in which memory is written."""

    def connect(self, action: Connect) -> None:
        """Connect to a target's memory. At a target: note that a source writes here."""

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages, and answer ``Proven``, once."""

    def forget(self, session: Session) -> None:
        """Release the resources of a session in which nothing is written any more."""


class SourceDataPort(DataPort, Protocol):
    """Writes into targets' memory. Answers each write and each gather once (``WriteEnded``)."""

    def choose(self, action: Choose) -> None:
        """Answer with ``Chosen`` which blocks go through staging."""

    def write(self, action: Write) -> None:
        """Start a write."""

    def gather(self, action: Gather) -> None:
        """Fill a local slot. ``post_gathered`` or ``discard`` follows, once."""

    def post_gathered(self, action: Post) -> None:
        """Write a gathered slot as soon as it is filled."""

    def discard(self, op: Op) -> None:
        """Do not write a gathered slot. Answer ``BUSY`` when the gather has ended."""

    def cut(self, session: Session) -> None:
        """Fail writes of a session that have not started, and all later ones."""


class TargetDataPort(DataPort, Protocol):
    """Local memory that sources write into."""

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages, and answer ``Scattered``."""


class PeersPort(Protocol):
    """Finds out whether peers are dead. Answers with ``PeerGone`` when that is proven."""

    def start_probing(self, record: SessionRecord) -> None:
        """Probe the session's peer until it is proven dead, or ``stop_probing``."""

    def stop_probing(self, record: SessionRecord) -> None:
        """Stop probing the session's peer; the proof is not needed any more."""

    def hint_death(self, record: SessionRecord) -> None:
        """Probe the session's peer for a short while: there was a sign that it may be dead."""


class RoomsPort(Protocol):
    """Tells the engine how rooms end, and asks it what it holds."""

    def report(self, action: Report) -> None:
        """Report a room's outcome."""

    def release(self, room: Room) -> None:
        """Report that the engine may reuse a room's memory."""

    def look_up(self, action: LookUp) -> None:
        """At a source: let the engine look up a prefix, and answer with ``Held``."""


D = TypeVar("D", bound=DataPort)


class Ports(NamedTuple, Generic[D]):
    """Ports of a machine."""

    control: ControlPort
    data: D
    peers: PeersPort
    rooms: RoomsPort


SourcePorts = Ports[SourceDataPort]
TargetPorts = Ports[TargetDataPort]


class MachineRunner(Generic[M, D]):
    """Runs one machine. Called by one thread."""

    def __init__(self, machine: M, ports: Ports[D], sessions: Sessions | None = None) -> None:
        self.machine = machine
        self.ports = ports
        self.sessions = Sessions(exposed=machine.exposed) if sessions is None else sessions
        self._events: deque[Event] = deque()
        self._frames: list[Send] = []
        # Rooms whose memory is not released.
        self._held: set[Room] = set()
        self._taking = False
        self._in_turn = False
        self._now = 0.0
        self._tick_at = inf
        self._turned_at = -inf
        times = machine.config
        # Every timer of the machine starts with at least this, except deadlines.
        self._shortest_timer_s = min(
            times.resend_s / 4, times.status_poll_s, times.heartbeat_s, times.credit_patience_s
        )

    def take(self, event: Event, now: float) -> None:
        """Let the machine handle an event, and carry out its actions.

        Called from inside an action, the event is queued and handled next.
        """
        self._events.append(event)
        if self._taking:
            return
        self._now = now
        self._taking = True
        try:
            while self._events:
                self._step(self._events.popleft(), now)
        finally:
            self._taking = False
            if not self._in_turn or len(self._frames) >= MAX_WAITING_FRAMES:
                self._send_frames()

    def answer(self, event: Event) -> None:
        """Take an event of this turn, such as a port's answer, at the time of the turn."""
        self.take(event, self._now)

    def turn(self, arrived: Iterable[Event], now: float) -> None:
        """Handle all events that have arrived, then advance the time, then send the frames.

        Frames of several steps leave together, such as those of a push and a close.
        """
        self._now = now
        self._in_turn = True
        try:
            self._report_stall(now)
            for event in arrived:
                self.take(event, now)
            self.advance_time(now)
        finally:
            self._in_turn = False
            self._send_frames()

    def _report_stall(self, now: float) -> None:
        """Tell the machine if this turn is late: its peers were not silent meanwhile."""
        late_s = now - max(self._tick_at, self._turned_at)
        self._turned_at = now
        if late_s > self.machine.config.heartbeat_s * MIN_STALL:
            self.take(OwnStall(late_s), now)

    def advance_time(self, now: float) -> None:
        """Tick if a timer may be due."""
        if now < self._tick_at:
            return
        self.take(Tick(), now)
        wakeup = self.machine.wakeup()
        self._tick_at = inf if wakeup is None else wakeup

    def wakeup(self) -> float:
        """Return when the next turn is due if nothing arrives.

        It may be earlier than the machine's own wakeup, and later by at most the shortest timer.
        Asking every room after every event would cost more than an occasional useless tick.
        """
        return self._tick_at

    def _step(self, event: Event, now: float) -> None:
        if isinstance(event, PeerGone):
            for record in self.sessions.confirm_dead(event.peer, event.incarnation):
                self._cut(record.session)
        else:
            self._handle(event, now)
        if self.sessions.ending:
            self._settle()

    def _handle(self, event: Event, now: float) -> None:
        due = now + self._shortest_timer_s
        if isinstance(event, OPENING):
            self._held.add(event.room)
            due = min(due, event.deadline)
        self._tick_at = min(self._tick_at, due)
        for action in self.machine.handle(event, now):
            if isinstance(action, Send):
                self._frames.append(action)
            else:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        ports = self.ports
        match action:
            case Report():
                ports.rooms.report(action)
            case Release(room=room):
                self._held.discard(room)
                ports.rooms.release(room)
            case Connect(peer=peer, incarnation=incarnation, session=session, metadata=metadata):
                self.sessions.add(peer, incarnation, session, metadata)
                ports.data.connect(action)
            case Disconnect(session=session):
                self._disconnect(session)
            case Prove():
                ports.data.prove(action)
            case Forget(session=session):
                self.sessions.abandon(session)
            case _:
                raise AssertionError(f"no port performs {action!r}")

    def _send_frames(self) -> None:
        """Send the frames of the steps since the last call, except redundant ones."""
        if not self._frames:
            return
        frames, self._frames = self._frames, []
        for frame in self._needed(frames):
            self.ports.control.send(frame.peer, frame.envelope)

    def _needed(self, frames: list[Send]) -> list[Send]:
        """Return the frames that are not redundant: at a target, all."""
        return frames

    def _disconnect(self, session: Session) -> None:
        record = self.sessions.cut(session)
        if record is not None:
            self._cut(session)
            if not record.is_over:
                # A write of unknown fate, or the peer's access to local memory, ends only with
                # the peer's process.
                self.ports.peers.start_probing(record)

    def _cut(self, session: Session) -> None:
        """Let no more writes of a session start. Does nothing at a target, which starts none."""

    def _settle(self) -> None:
        """Tell the machine which sessions are proven over, and drop those it has forgotten."""
        proven, dropped = self.sessions.settle()
        for record in proven:
            self._events.append(Disconnected(record.session))
        for record in dropped:
            self.ports.data.forget(record.session)
        for record in (*proven, *dropped):
            if not self.sessions.needs_proof(record.peer, record.incarnation):
                self.ports.peers.stop_probing(record)

    def probe_links(self, condition: Callable[[Link], bool] = lambda _: True) -> None:
        """Probe the peers of these links now, after a sign that some peer may be dead."""
        for link in list(self.machine.links.values()):
            record = self.sessions.records.get(link.session)
            if record is not None and condition(link):
                self.ports.peers.hint_death(record)

    @property
    def holds_no_memory(self) -> bool:
        """Whether all rooms are released, so that peers may take this endpoint for dead."""
        return not self._held


class SourceRunner(MachineRunner[SourceMachine, SourceDataPort]):
    """Runner of a source: tracks its writes, and sends the note of each after its data."""

    def __init__(
        self, machine: SourceMachine, ports: SourcePorts, sessions: Sessions | None = None
    ) -> None:
        super().__init__(machine, ports, sessions)
        # Frames that are sent when their write has succeeded.
        self._notes: dict[Op, Send] = {}
        # Gathers that were neither posted nor discarded.
        self._gathers: dict[Op, Gather] = {}

    def send_note(self, op: Op) -> None:
        """Send the note of a successful write at once, before the machine takes its result."""
        self._queue_note(op)
        self._send_frames()

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, WriteEnded):
            self._write_ended(event)
        super()._handle(event, now)

    def _write_ended(self, event: WriteEnded) -> None:
        op, fate = event.op, event.fate
        self._gathers.pop(op, None)
        record = self.sessions.end(op, doubtful=fate is WriteFate.UNKNOWN)
        if fate is None:
            self._queue_note(op)
            return
        self._notes.pop(op, None)
        if record is not None and fate is not WriteFate.BUSY:
            self.ports.peers.hint_death(record)

    def _perform(self, action: Action) -> None:
        match action:
            case Choose():
                self.ports.data.choose(action)
            case Write():
                if self._start(action.op, action.transfer.session):
                    self._notes[action.op] = Send(action.transfer.peer, action.note)
                    self.ports.data.write(action)
            case Gather():
                if self._start(action.op, action.transfer.session):
                    self._gathers[action.op] = action
                    self.ports.data.gather(action)
            case Post():
                self._post(action)
            case Discard(op=op):
                self._discard(op)
            case LookUp():
                self.ports.rooms.look_up(action)
            case _:
                super()._perform(action)

    def _start(self, op: Op, session: Session) -> bool:
        starts = self.sessions.start(op, session)
        if not starts:
            # The session may be proven over already, so nothing may start in it.
            self._events.append(WriteEnded(op, WriteFate.FAILED))
        return starts

    def _post(self, action: Post) -> None:
        # If the gather has ended or its session was cut, an answer is on its way.
        gather = self._gathers.pop(action.op, None)
        if gather is not None:
            self._notes[action.op] = Send(gather.transfer.peer, action.note)
            self.ports.data.post_gathered(action)

    def _discard(self, op: Op) -> None:
        if self._gathers.pop(op, None) is not None:
            self.ports.data.discard(op)

    def _queue_note(self, op: Op) -> None:
        """Queue the note of a write that has succeeded, before frames that depend on it."""
        note = self._notes.pop(op, None)
        if note is not None:
            self._frames.append(note)

    def _needed(self, frames: list[Send]) -> list[Send]:
        return drop_redundant(frames) if len(frames) > 1 else frames

    def _cut(self, session: Session) -> None:
        """Let no more writes of a session start, and discard what was gathered for it."""
        self.ports.data.cut(session)
        gathers = self._gathers.items()
        for op in [op for op, gather in gathers if gather.transfer.session == session]:
            self._discard(op)


class TargetRunner(MachineRunner[TargetMachine, TargetDataPort]):
    """Runner of a target, which starts no writes."""

    def _perform(self, action: Action) -> None:
        if isinstance(action, Scatter):
            self.ports.data.scatter(action)
        else:
            super()._perform(action)


def drop_redundant(frames: list[Send]) -> list[Send]:
    """Remove frames whose content a later frame of the same room to the same peer repeats.

    Any later frame of a room implies its Accept. A Close names all writes that used no credit, so
    it implies their Arrived messages, unless it is full.
    """
    later: set[tuple[Peer, Room, int]] = set()
    closed: set[tuple[Peer, Room, int]] = set()
    kept = []
    for frame in reversed(frames):
        body = frame.envelope.body
        if isinstance(body, RoomMessage):
            key = (frame.peer, body.room, body.generation)
            match body:
                case Accept() if key in later:
                    continue
                case Arrived(serial=None) if key in closed:
                    continue
                case Close(written=written) if len(written) < MAX_BLOCKS:
                    closed.add(key)
            later.add(key)
        kept.append(frame)
    return kept[::-1]


def frame_event(message: Envelope | BadFrame) -> Received | WrongVersion | None:
    """Return the event for a decoded frame, or None if the machine must not see it."""
    if not isinstance(message, BadFrame):
        return Received(message)
    header = message.header
    if message.fault is not FrameFault.VERSION or header is None:
        return None
    return WrongVersion(header.sender, header.session, header.version, header.seq == 0)
