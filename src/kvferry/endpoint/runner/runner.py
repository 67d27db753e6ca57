"""The runner: one machine, its ports, and the order in which things are taken.

An event goes to the machine, the machine's actions go to the ports, and what a port
answers at once is taken as the next event. The runner adds what no machine can know:
which sessions have something in flight (``sessions``), and therefore when a connection
that was given up is proven to be quiet.

Frames and answers are taken before time is: whoever was stopped for a while must hear
what others said meanwhile before it concludes that they were silent. A turn that comes late
tells the machine by how much, so that silence counts only the time in which we ran.

No thread, no clock, no socket. The endpoints, the simulator and the explorer run this
same runner, each with its own ports; its broken versions are in ``testing/sim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    Open,
    OwnStall,
    Post,
    Receive,
    Received,
    Release,
    Report,
    Scatter,
    Send,
    SendFailed,
    Sent,
    Tick,
    Write,
    WriteFate,
    WrongVersion,
)
from kvferry.protocol.links import Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    Accept,
    Arrived,
    Close,
    Envelope,
    RoomMessage,
)
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.target import TargetMachine

M = TypeVar("M", bound=Machine)

# So many frames are said before a turn is over: peers need not wait for the end of a long one.
MOST_UNSAID = 16


class PeerGone(Event, frozen=True):
    """Proof: that life of a peer is over, and its process writes and reads nothing."""

    peer: Peer
    incarnation: int


class ControlPort(Protocol):
    """Where frames go out."""

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """It may be lost."""


class SourceDataPort(Protocol):
    """Targets' memory, and how to write into it.

    Answers each write, and each gather, with ``Sent`` or ``SendFailed``, once.
    """

    def connect(self, action: Connect) -> None:
        """Reach a target's memory."""

    def choose(self, action: Choose) -> None:
        """Say with ``Chosen`` which blocks go through staging."""

    def write(self, action: Write) -> None:
        """Write, and say how it ended."""

    def gather(self, action: Gather) -> None:
        """Fill a local slot. What becomes of it is said by one of the next two, once."""

    def post_gathered(self, action: Post) -> None:
        """Write what was gathered, when it is, and say how that ended."""

    def discard(self, op: Op) -> None:
        """Say ``BUSY`` when the gather has ended, and write nothing."""

    def cut(self, session: Session) -> None:
        """Let nothing more of a session start; what has not begun fails."""

    def forget(self, session: Session) -> None:
        """Nothing of a session is in flight: give up what it took."""


class TargetDataPort(Protocol):
    """Local memory that sources write into."""

    def connect(self, action: Connect) -> None:
        """A source writes here."""

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages, and say ``Scattered``."""

    def forget(self, session: Session) -> None:
        """Nothing of a session is written here any more: give up what it took."""


class PeersPort(Protocol):
    """Who asks whether peers live. Answers with ``PeerGone``, when that is proven."""

    def start_probing(self, record: SessionRecord) -> None:
        """Ask after that life until it is proven gone, or acquitted."""

    def stop_probing(self, peer: Peer, incarnation: int) -> None:
        """Nobody waits for that proof any more."""

    def sign(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """There was a sign that it may be gone: ask for a short while."""


class RoomsPort(Protocol):
    """Who hears how rooms end."""

    def report(self, room: Room, outcome: Outcome) -> None:
        """A room has ended for its caller."""

    def release(self, room: Room) -> None:
        """A room's memory is the caller's again."""


class SourcePorts(NamedTuple):
    """Everything that a source machine can ask for."""

    control: ControlPort
    data: SourceDataPort
    peers: PeersPort
    rooms: RoomsPort


class TargetPorts(NamedTuple):
    """Everything that a target machine can ask for."""

    control: ControlPort
    data: TargetDataPort
    peers: PeersPort
    rooms: RoomsPort


P = TypeVar("P", bound=SourcePorts | TargetPorts)


class MachineRunner(ABC, Generic[M, P]):
    """A machine that is turned by somebody else's hand."""

    def __init__(self, machine: M, ports: P, sessions: Sessions | None = None) -> None:
        self.machine = machine
        self.ports = ports
        self.sessions = Sessions(exposed=machine.exposed) if sessions is None else sessions
        self._events: deque[Event] = deque()
        self._frames: list[Send] = []
        self._held: set[Room] = set()
        self._turning = False
        self._in_turn = False
        self._now = 0.0
        self._tick_at = inf
        self._turned_at = -inf
        times = machine.config
        # No timer of a machine begins with less, but for deadlines.
        self._least_s = min(
            times.resend_s / 4, times.status_poll_s, times.heartbeat_s, times.credit_patience_s
        )

    # ------------------------------------------------------------ events

    def take(self, event: Event, now: float) -> None:
        """Let the machine take a step, and carry out what it says.

        While something is carried out: take this next.
        """
        self._events.append(event)
        if self._turning:
            return
        self._now = now
        self._turning = True
        try:
            while self._events:
                self._step(self._events.popleft(), now)
        finally:
            self._turning = False
            if not self._in_turn or len(self._frames) >= MOST_UNSAID:
                self._say()

    def answer(self, event: Event) -> None:
        """Take what a port answers, at the time of what it was asked."""
        if self._turning:
            self._events.append(event)
        else:
            self.take(event, self._now)

    def turn(self, arrived: Iterable[Event], now: float) -> None:
        """Take all that has come, and then the time. What is to be said is said at the end.

        An engine that pushes and closes does so in two steps, and the second says it all.
        """
        self._now = now
        self._in_turn = True
        try:
            self._count_stall(now)
            for event in arrived:
                self.take(event, now)
            self.pass_time(now)
        finally:
            self._in_turn = False
            self._say()

    def _count_stall(self, now: float) -> None:
        """A turn that comes late was not run in time; others were not silent meanwhile."""
        late_s = now - max(self._tick_at, self._turned_at)
        self._turned_at = now
        if late_s > self.machine.config.heartbeat_s / 2:
            self.take(OwnStall(late_s), now)

    def pass_time(self, now: float) -> None:
        """Tick if a timer may be due."""
        if now < self._tick_at:
            return
        self.take(Tick(), now)
        self._tick_at = self._exact_wakeup()

    def wakeup(self) -> float:
        """When to turn again although nothing comes.

        It may be earlier than the machine's own wakeup, and later by no more than the
        shortest of its timers takes. Asking every room after every event would cost more
        than a tick now and then that finds nothing to do.
        """
        return self._tick_at

    def _exact_wakeup(self) -> float:
        wakeup = self.machine.wakeup()
        return inf if wakeup is None else wakeup

    # ------------------------------------------------------------ one step

    def _step(self, event: Event, now: float) -> None:
        if isinstance(event, PeerGone):
            for record in self.sessions.confirm_dead(event.peer, event.incarnation):
                self._cut(record.session)
        else:
            self._handle(event, now)
        if self.sessions.ending:
            self._settle()

    def _handle(self, event: Event, now: float) -> None:
        due = now + self._least_s
        if isinstance(event, Open | Receive):
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
            case Report(room=room, outcome=outcome):
                ports.rooms.report(room, outcome)
            case Release(room=room):
                self._held.discard(room)
                ports.rooms.release(room)
            case Connect(peer=peer, incarnation=incarnation, session=session, metadata=metadata):
                self.sessions.add(peer, incarnation, session, metadata)
                ports.data.connect(action)
            case Disconnect(session=session):
                self._disconnect(session)
            case Forget(session=session):
                self.sessions.unwant(session)
            case _:
                raise AssertionError(f"nobody carries out {action!r}")

    def _say(self) -> None:
        """Send what these steps had to say, without what is said again by what follows it."""
        if not self._frames:
            return
        frames, self._frames = self._frames, []
        for frame in without_needless(frames) if len(frames) > 1 else frames:
            self.ports.control.send(frame.peer, frame.envelope)

    # ------------------------------------------------------------ proof

    def _disconnect(self, session: Session) -> None:
        record = self.sessions.cut(session)
        if record is not None:
            self._cut(session)
            if not record.is_over:
                # Where a write's fate is unknown, or the peer writes here, only the end of its
                # process settles it.
                self.ports.peers.start_probing(record)

    @abstractmethod
    def _cut(self, session: Session) -> None:
        """Let nothing more of a session start."""

    def _settle(self) -> None:
        """Say what is proven, and let go of what nobody waits for."""
        proven, dropped = self.sessions.settle()
        for record in proven:
            self._events.append(Disconnected(record.peer, record.incarnation, record.session))
        for record in dropped:
            self.ports.data.forget(record.session)
        for record in (*proven, *dropped):
            if not self.sessions.awaits(record.peer, record.incarnation):
                self.ports.peers.stop_probing(record.peer, record.incarnation)

    def _sign(self, record: SessionRecord) -> None:
        self.ports.peers.sign(record.peer, record.incarnation, record.metadata)

    def ask_after(self, whom: Callable[[Link], bool] = lambda _: True) -> None:
        """There was a sign that some peer may be gone: ask, rather than wait for its silence."""
        for link in list(self.machine.links.values()):
            record = self.sessions.get(link.session)
            if record is not None and whom(link):
                self._sign(record)

    @property
    def may_leave(self) -> bool:
        """Whether no memory is held for anybody, so that others may be told of our end."""
        return not self._held


class SourceRunner(MachineRunner[SourceMachine, SourcePorts]):
    """The runner of a source: knows its writes, and sends each note after its data."""

    def __init__(
        self, machine: SourceMachine, ports: SourcePorts, sessions: Sessions | None = None
    ) -> None:
        super().__init__(machine, ports, sessions)
        # Notes that leave when their writes have ended well.
        self._notes: dict[Op, Send] = {}
        # Gathers that were neither posted nor discarded.
        self._gathers: dict[Op, Gather] = {}

    def tell(self, op: Op) -> None:
        """A write has ended well: say so before its end is taken, if somebody waits for that."""
        self._note(op)
        self._say()

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Sent | SendFailed):
            self._write_ended(event)
        super()._handle(event, now)

    def _write_ended(self, event: Sent | SendFailed) -> None:
        op, fate = event.op, event.fate if isinstance(event, SendFailed) else None
        self._gathers.pop(op, None)
        record = self.sessions.end(op, doubtful=fate is WriteFate.UNKNOWN)
        if fate is None:
            self._note(op)
            return
        self._notes.pop(op, None)
        if record is not None and fate is not WriteFate.BUSY:
            self._sign(record)

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
            case _:
                super()._perform(action)

    def _start(self, op: Op, session: Session) -> bool:
        starts = self.sessions.start(op, session)
        if not starts:
            # Whoever has proof that nothing is in flight must also let nothing start.
            self._events.append(SendFailed(op, WriteFate.FAILED))
        return starts

    def _post(self, action: Post) -> None:
        # If it has ended or its session was cut, an answer is on its way.
        gather = self._gathers.pop(action.op, None)
        if gather is not None:
            self._notes[action.op] = Send(gather.transfer.peer, action.note)
            self.ports.data.post_gathered(action)

    def _discard(self, op: Op) -> None:
        if self._gathers.pop(op, None) is not None:
            self.ports.data.discard(op)

    def _note(self, op: Op) -> None:
        """The data is there: now its note may leave, before anything that builds on it."""
        note = self._notes.pop(op, None)
        if note is not None:
            self._frames.append(note)

    def _cut(self, session: Session) -> None:
        """Let nothing more of a session start: what was gathered for it will never be written."""
        self.ports.data.cut(session)
        gathers = self._gathers.items()
        for op in [op for op, gather in gathers if gather.transfer.session == session]:
            self._discard(op)


class TargetRunner(MachineRunner[TargetMachine, TargetPorts]):
    """The runner of a target, which starts no writes."""

    def _perform(self, action: Action) -> None:
        if isinstance(action, Scatter):
            self.ports.data.scatter(action)
        else:
            super()._perform(action)

    def _cut(self, session: Session) -> None:
        """Only the end of its process stops a source's writes."""


def without_needless(frames: list[Send]) -> list[Send]:
    """Leave out what a later frame of the same room to the same peer says too.

    A Close names all that was written without credits, unless that is more than it holds, and
    accepts the offer that it answers; so does anything else about the room.
    """
    later: set[tuple[Peer, Room, int]] = set()
    closed: set[tuple[Peer, Room, int]] = set()
    kept = []
    for frame in reversed(frames):
        body = frame.envelope.body
        if isinstance(body, RoomMessage):
            key = (frame.peer, body.room, body.generation)
            direct = isinstance(body, Arrived) and body.serial is None
            if (isinstance(body, Accept) and key in later) or (direct and key in closed):
                continue
            later.add(key)
            if isinstance(body, Close) and len(body.written) < MAX_BLOCKS:
                closed.add(key)
        kept.append(frame)
    return kept[::-1]


def frame_event(message: Envelope | BadFrame) -> Event | None:
    """What a decoded frame is to a machine; None if it is nothing."""
    if not isinstance(message, BadFrame):
        return Received(message)
    header = message.header
    if message.fault is not FrameFault.VERSION or header is None:
        return None
    return WrongVersion(header.sender, header.session, header.version, header.seq == 0)
