"""What a source and a target have in common: links, order, heartbeats, silence.

Frames of one link are numbered. A frame that comes after a later one is
dropped, so reordering becomes loss, and loss is repaired by repeating what
still matters. That is why an Offer that was overtaken by its own Abort can do
no harm. Arrival notes leave when their writes have ended and are not numbered;
they may come in any order and any number of times.

Sans-IO: no clock, no randomness, no thread. One owner calls ``handle``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Generation, Peer, Room, Session
from kvferry.layout.layout import Layout
from kvferry.plan.plan import Plan
from kvferry.protocol.events import (
    Action,
    Connect,
    Disconnect,
    Disconnected,
    Event,
    Forget,
    OwnStall,
    PeerRuns,
    Received,
    Send,
    Tick,
    WrongVersion,
)
from kvferry.protocol.messages import (
    VERSION,
    Body,
    Envelope,
    Heartbeat,
    Hello,
    NoSession,
    RefusalCode,
    Refuse,
    TransportOffer,
    TransportOffers,
)
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance

# Plans are kept for the layouts last seen; an instance has one, and there are few.
MAX_PLANS = 64
# How many attempts that were let go of a link remembers, and for how long.
MAX_DRAINED, DRAINED_S = 16384, 30.0


class Identity(msgspec.Struct, frozen=True):
    """Who an endpoint is: which rank, which life of it, what it holds of which model.

    ``metadata`` is what the runtime wants every peer to know.
    """

    peer: Peer
    incarnation: int
    layout: Layout
    fingerprint: str
    metadata: bytes = b""
    transports: TransportOffers = TransportOffers()


@dataclass(slots=True, eq=False)
class Link:
    """What is known of one peer in one session.

    ``incarnation`` is None until it speaks; ``metadata`` is its runtime's. ``transport``
    is empty until memory was reached.
    """

    peer: Peer
    session: Session
    state: LinkState
    plan: Plan
    incarnation: int | None
    heard_at: float
    said_at: float
    begun_at: float
    hello: Hello | None = None
    metadata: bytes = b""
    # When it last said something; ``heard_at`` is later if its process was seen to run since.
    spoke_at: float = 0.0
    transport: str = ""
    seq_out: int = 0
    seq_in: int = 0
    connected: bool = False
    # A source's: the attempts at rooms that it let go of on this link lately, and when.
    drained: dict[tuple[Room, Generation], float] = field(default_factory=dict)

    def remember_drained(self, room: Room, generation: Generation, now: float) -> None:
        """Remember an attempt for a while: what a target repeats about it is no news then."""
        self.drained.pop((room, generation), None)
        self.drained[room, generation] = now
        oldest = next(iter(self.drained))
        while len(self.drained) > MAX_DRAINED or self.drained[oldest] < now - DRAINED_S:
            del self.drained[oldest]
            oldest = next(iter(self.drained))

    def __repr__(self) -> str:
        return f"<Link {self.peer} {self.session} {self.state}>"


class Endpoint(ABC):
    """Links to peers, and the frame around every step of a machine."""

    # Whether peers write into this endpoint's memory: then only their end proves that none does.
    exposed: ClassVar[bool]

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        self.me = identity.peer
        self.incarnation = identity.incarnation
        self.layout = identity.layout
        self.fingerprint = identity.fingerprint
        self.metadata = identity.metadata
        self.transports = identity.transports
        self.config = config
        self.links: dict[Session, Link] = {}
        self.current: dict[Peer, Link] = {}
        self.counts: Counter[str] = Counter()
        self._plans: dict[Layout, Plan] = {}
        self._now = 0.0
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one step. A step that raises ``Misuse`` has changed nothing."""
        self._now = max(self._now, now)
        self._out = []
        self._take(event)
        self._settle()
        actions, self._out = self._out, []
        return actions

    def _take(self, event: Event) -> None:
        """What an event means; machines have events of their own before these."""
        match event:
            case Received():
                self._on_received(event)
            case Tick():
                self._on_tick()
            case Disconnected():
                self._on_disconnected(event)
            case WrongVersion():
                self._on_wrong_version(event)
            case PeerRuns():
                self._on_peer_runs(event)
            case OwnStall():
                self._on_own_stall(event)
            case _:
                raise Misuse(f"{type(self).__name__} does not know {type(event).__name__}")

    def _take_message(self, link: Link, body: Body) -> None:
        """What a message means; machines have messages of their own before these."""
        if isinstance(body, Heartbeat):
            self.counts["heartbeats"] += 1
        else:
            self.counts["misdirected"] += 1

    def wakeup(self) -> float | None:
        """When the next ``Tick`` has something to do; None if there is nothing to wait for."""
        soonest = min(self._timers(), default=inf)
        return None if soonest == inf else soonest

    @property
    def _any_lost(self) -> bool:
        return any(link.state is LinkState.LOST for link in self.links.values())

    # ------------------------------------------------------------ for the machines

    @abstractmethod
    def _settle(self) -> None:
        """Draw the consequences of a step: start writes, grant credits, end rooms."""

    @abstractmethod
    def _link_lost(self, link: Link, failure: Failure) -> None:
        """A link was lost: fail what depends on it."""

    @abstractmethod
    def _link_gone(self, link: Link) -> None:
        """Proof came that a lost link's peer writes and reads nothing any more."""

    @abstractmethod
    def _link_needed(self, link: Link) -> bool:
        """Whether something still waits for news on a lost link."""

    @abstractmethod
    def _room_timers(self) -> Iterable[float]:
        """When rooms want to be woken."""

    @abstractmethod
    def _tick_rooms(self) -> None:
        """Deadlines and repetitions of rooms."""

    def _plan_with(self, other: Layout) -> Plan:
        """The plan with that peer's layout. Raises ``Refused``."""
        if other not in self._plans:
            plan = self._make_plan(other)
            if len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[other] = plan
        return self._plans[other]

    @abstractmethod
    def _make_plan(self, other: Layout) -> Plan:
        """The plan between our layout and the other side's, whichever way round."""

    # ------------------------------------------------------------ sending

    def _do(self, action: Action) -> None:
        self._out.append(action)

    def _say(self, link: Link, body: Body) -> None:
        """Send a numbered frame."""
        link.seq_out += 1
        link.said_at = self._now
        self._do(Send(link.peer, self._envelope(link.session, link.seq_out, body)))

    def _note(self, link: Link, body: Body) -> None:
        """Send a frame that may come in any order."""
        self._do(Send(link.peer, self._envelope(link.session, 0, body)))

    def _envelope(self, session: Session, seq: int, body: Body) -> Envelope:
        return Envelope(self.me, self.incarnation, session, seq, body)

    # ------------------------------------------------------------ receiving

    def _on_received(self, event: Received) -> None:
        envelope = event.envelope
        link = self._link_of(envelope)
        if link is None or not self._in_order(link, envelope):
            return
        self._heard_from(link)
        if link.session not in self.links:
            return
        self._take_message(link, envelope.body)

    def _heard_from(self, link: Link) -> None:
        link.heard_at = link.spoke_at = self._now

    def _on_peer_runs(self, event: PeerRuns) -> None:
        """Not to speak for a while is no silence, but not to speak for long is."""
        link = self.links.get(event.session)
        if link is not None and self._now < link.spoke_at + self.config.unresponsive_s:
            link.heard_at = max(link.heard_at, min(event.at, self._now))

    def _on_own_stall(self, event: OwnStall) -> None:
        for link in self.links.values():
            link.heard_at = min(self._now, link.heard_at + event.seconds)
            link.begun_at = min(self._now, link.begun_at + event.seconds)

    def _find(self, envelope: Envelope) -> Link | None:
        """The link of the session that a frame names."""
        return self.links.get(envelope.session)

    def _link_of(self, envelope: Envelope) -> Link | None:
        """The link that a frame belongs to, if it belongs to one."""
        link = self._find(envelope)
        if link is None or link.peer != envelope.sender:
            self._unknown_session(envelope)
            return None
        if link.incarnation is None:
            link.incarnation = envelope.incarnation
        if link.incarnation != envelope.incarnation:
            self.counts["other-incarnation"] += 1
            self._lose(link, FailureCode.PEER_RESTARTED)
            return None
        if isinstance(envelope.body, NoSession):
            self._session_unknown(link)
            return None
        return link

    def _session_unknown(self, link: Link) -> None:
        """The peer lives, and knows nothing of this session any more."""
        self._lose(link, FailureCode.SESSION_REPLACED)

    def _unknown_session(self, envelope: Envelope) -> None:
        """Tell a living peer that its session is over; nobody else gets an answer."""
        self.counts["stale"] += 1
        if envelope.seq and not isinstance(envelope.body, NoSession | Hello):
            frame = self._envelope(envelope.session, 0, NoSession())
            self._do(Send(envelope.sender, frame))

    def _on_wrong_version(self, event: WrongVersion) -> None:
        """Give the link up, or let a stranger see our version so that it can."""
        text = f"{event.sender} speaks version {event.version}, this is version {VERSION}"
        link = self.links.get(event.session)
        if link is not None and link.peer == event.sender:
            self._lose(link, FailureCode.REFUSED, f"{text}; run one version on both sides")
        elif not event.answered:
            refusal = Refuse(RefusalCode.VERSION, text)
            self._do(Send(event.sender, self._envelope(event.session, 0, refusal)))

    def _in_order(self, link: Link, envelope: Envelope) -> bool:
        if envelope.seq == 0:
            return True
        if envelope.seq <= link.seq_in:
            self.counts["overtaken"] += 1
            return False
        link.seq_in = envelope.seq
        return True

    # ------------------------------------------------------------ losing a peer

    def _lose(self, link: Link, code: FailureCode, message: str = "") -> None:
        """Give a link up. What it may still write waits for proof."""
        if link.state in (LinkState.LOST, LinkState.GONE):
            return
        link.state = advance(LINK, link.state, LinkStep.LOSE)
        if self.current.get(link.peer) is link:
            del self.current[link.peer]
        if link.incarnation is not None:
            self._do(Disconnect(link.peer, link.incarnation, link.session))
        text = message or f"lost {link.peer}"
        self._link_lost(link, Failure.of(code, text))
        self._drop_if_unneeded(link)

    def _drop_if_unneeded(self, link: Link) -> None:
        if link.state is LinkState.LOST and not self._link_needed(link):
            self._unlink(link)

    def _connected(self, link: Link, transports: tuple[TransportOffer, ...]) -> None:
        """The peer has said who it is: its memory, or ours, may be reached from now on."""
        assert link.incarnation is not None
        link.connected = True
        about = link.peer, link.incarnation, link.session, link.metadata
        self._do(Connect(*about, transports, link.hello))

    def _unlink(self, link: Link) -> None:
        if self.links.pop(link.session, None) is not None and link.connected:
            self._do(Forget(link.session))

    def _on_disconnected(self, event: Disconnected) -> None:
        for link in list(self.links.values()):
            same_peer = (link.peer, link.incarnation) == (event.peer, event.incarnation)
            if same_peer and event.session in (None, link.session):
                self._lose(link, FailureCode.PEER_GONE)
                self._gone(link)

    def _gone(self, link: Link) -> None:
        """Proof came that nothing of a lost link's session is in flight."""
        link.state = advance(LINK, link.state, LinkStep.GONE)
        self._unlink(link)
        self._link_gone(link)

    # ------------------------------------------------------------ time

    def _on_tick(self) -> None:
        for link in list(self.links.values()):
            self._tick_link(link)
        self._tick_rooms()

    def _tick_link(self, link: Link) -> None:
        if link.state is not LinkState.UP:
            return
        if self._now >= link.heard_at + self.config.silence_s:
            self._lose(link, FailureCode.PEER_SILENT, f"nothing heard from {link.peer}")
        elif self._now >= link.said_at + self.config.heartbeat_s:
            self._say(link, Heartbeat())

    def _timers(self) -> Iterable[float]:
        yield from map(self._link_timer, self.links.values())
        yield from self._room_timers()

    def _link_timer(self, link: Link) -> float:
        """When a link wants to be woken."""
        if link.state is not LinkState.UP:
            return inf
        silent_at = link.heard_at + self.config.silence_s
        return min(silent_at, link.said_at + self.config.heartbeat_s)
