"""Links to peers: numbered frames, heartbeats, silence, loss and proof.

Frames of one link are numbered. A frame that comes after a later one is
dropped, so reordering becomes loss, and loss is repaired by repeating what
still matters. That is why an Offer that was overtaken by its own Abort can do
no harm. Arrival notes leave when their writes have ended and are not numbered;
they may come in any order and any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.ids import Generation, Peer, Room, Session
from kvferry.layout.layout import Layout
from kvferry.plan.plan import Plan
from kvferry.plan.reshard import reshard
from kvferry.protocol.events import (
    Connect,
    Disconnect,
    Disconnected,
    Forget,
    OwnStall,
    PeerRuns,
    Send,
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
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance

# Plans are kept for the layouts last seen; an instance has one, and there are few.
MAX_PLANS = 64
# How many attempts that were let go of a link remembers, and for how long.
MAX_DRAINED, DRAINED_S = 16384, 30.0


class Identity(msgspec.Struct, frozen=True):
    """Identity of an endpoint: its rank, its incarnation, its layout and its model.

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
    """State of the connection to one peer in one session.

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


class Dependents(Protocol):
    """The rooms of a machine, which depend on links."""

    def link_lost(self, link: Link, failure: Failure) -> None:
        """Fail what depends on a link that was lost."""

    def link_gone(self, link: Link) -> None:
        """Proof came that a lost link's peer writes and reads nothing any more."""

    def link_needed(self, link: Link) -> bool:
        """Whether something still waits for news on a lost link."""


class Plans:
    """Plans between this endpoint's layout and those of its peers, the last ``MAX_PLANS``."""

    def __init__(self, layout: Layout, *, sends: bool) -> None:
        self._layout = layout
        self._sends = sends
        self._plans: dict[Layout, Plan] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def plan_with(self, other: Layout) -> Plan:
        """Return the plan with that peer's layout. Raises ``Refused``."""
        if other not in self._plans:
            sides = (self._layout, other) if self._sends else (other, self._layout)
            plan = reshard(*sides)
            if len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[other] = plan
        return self._plans[other]


class Links:
    """Every link of one endpoint. A subclass adds its half of the handshake."""

    def __init__(
        self, identity: Identity, config: ProtocolConfig, outbox: Outbox, rooms: Dependents
    ) -> None:
        self.identity = identity
        self.config = config
        self.by_session: dict[Session, Link] = {}
        self.current: dict[Peer, Link] = {}
        self._outbox = outbox
        self._rooms = rooms

    # ------------------------------------------------------------ sending

    def say(self, link: Link, body: Body) -> None:
        """Send a numbered frame."""
        link.seq_out += 1
        link.said_at = self._outbox.now
        self._outbox.do(Send(link.peer, self.envelope(link.session, link.seq_out, body)))

    def note(self, peer: Peer, session: Session, body: Body) -> None:
        """Send a frame that may come in any order."""
        self._outbox.do(Send(peer, self.envelope(session, 0, body)))

    def envelope(self, session: Session, seq: int, body: Body) -> Envelope:
        """Return a frame of this endpoint."""
        return Envelope(self.identity.peer, self.identity.incarnation, session, seq, body)

    # ------------------------------------------------------------ receiving

    def receive(self, envelope: Envelope) -> Link | None:
        """Return the link on which the body of a frame is to be acted on, if it is."""
        link = self.find(envelope)
        if link is None or not self.in_order(link, envelope):
            return None
        self.heard(link)
        return link if link.session in self.by_session else None

    def find(self, envelope: Envelope) -> Link | None:
        """Return the link that a frame belongs to, if it belongs to one."""
        link = self._named(envelope)
        if link is None or link.peer != envelope.sender:
            self._outbox.counts["stale"] += 1
            # Tell a living peer that its session is over; nobody else gets an answer.
            if envelope.seq and not isinstance(envelope.body, NoSession | Hello):
                self.note(envelope.sender, envelope.session, NoSession())
            return None
        if link.incarnation is None:
            link.incarnation = envelope.incarnation
        if link.incarnation != envelope.incarnation:
            self._outbox.counts["other-incarnation"] += 1
            self.lose(link, FailureCode.PEER_RESTARTED)
            return None
        if isinstance(envelope.body, NoSession):
            self._session_unknown(link)
            return None
        return link

    def _named(self, envelope: Envelope) -> Link | None:
        """Return the link of the session that a frame names."""
        return self.by_session.get(envelope.session)

    def _session_unknown(self, link: Link) -> None:
        """The peer lives, and knows nothing of this session any more."""
        self.lose(link, FailureCode.SESSION_REPLACED)

    def in_order(self, link: Link, envelope: Envelope) -> bool:
        """Return whether no later frame has overtaken this one."""
        if envelope.seq == 0:
            return True
        if envelope.seq <= link.seq_in:
            self._outbox.counts["overtaken"] += 1
            return False
        link.seq_in = envelope.seq
        return True

    def heard(self, link: Link) -> None:
        """A frame came in its order."""
        link.heard_at = link.spoke_at = self._outbox.now

    def wrong_version(self, event: WrongVersion) -> None:
        """Give the link up, or let a stranger see our version so that it can."""
        text = f"{event.sender} speaks version {event.version}, this is version {VERSION}"
        link = self.by_session.get(event.session)
        if link is not None and link.peer == event.sender:
            self.lose(link, FailureCode.REFUSED, f"{text}; run one version on both sides")
        elif not event.answered:
            self.note(event.sender, event.session, Refuse(RefusalCode.VERSION, text))

    # ------------------------------------------------------------ losing a peer

    def lose(self, link: Link, code: FailureCode, message: str = "") -> None:
        """Give a link up. What its peer may still write waits for proof."""
        if link.state in (LinkState.LOST, LinkState.GONE):
            return
        link.state = advance(LINK, link.state, LinkStep.LOSE)
        if self.current.get(link.peer) is link:
            del self.current[link.peer]
        if link.incarnation is not None:
            self._outbox.do(Disconnect(link.peer, link.incarnation, link.session))
        self._rooms.link_lost(link, Failure.of(code, message or f"lost {link.peer}"))
        self.drop_if_unneeded(link)

    def drop_if_unneeded(self, link: Link) -> None:
        """Forget a lost link if nothing waits for news on it."""
        if link.state is LinkState.LOST and not self._rooms.link_needed(link):
            self._unlink(link)

    def _unlink(self, link: Link) -> None:
        if self.by_session.pop(link.session, None) is not None and link.connected:
            self._outbox.do(Forget(link.session))

    def _connected(self, link: Link, transports: tuple[TransportOffer, ...]) -> None:
        """The peer has said who it is: its memory, or ours, may be reached from now on."""
        assert link.incarnation is not None
        link.connected = True
        about = link.peer, link.incarnation, link.session, link.metadata
        self._outbox.do(Connect(*about, transports, link.hello))

    def refused(self, link: Link, refusal: Refuse) -> None:
        """Give up a link that can't work."""
        self.lose(link, FailureCode.REFUSED, f"{refusal.code}: {refusal.message}")

    def disconnected(self, event: Disconnected) -> None:
        """Take proof that nothing is in flight with a peer, or in one session with it."""
        for link in list(self.by_session.values()):
            same_peer = (link.peer, link.incarnation) == (event.peer, event.incarnation)
            if same_peer and event.session in (None, link.session):
                self.lose(link, FailureCode.PEER_GONE)
                self.gone(link)

    def gone(self, link: Link) -> None:
        """Proof came that nothing of a lost link's session is in flight."""
        link.state = advance(LINK, link.state, LinkStep.GONE)
        self._unlink(link)
        self._rooms.link_gone(link)

    # ------------------------------------------------------------ time

    def peer_runs(self, event: PeerRuns) -> None:
        """Not to speak for a while is no silence, but not to speak for long is."""
        link, now = self.by_session.get(event.session), self._outbox.now
        if link is not None and now < link.spoke_at + self.config.unresponsive_s:
            link.heard_at = max(link.heard_at, min(event.at, now))

    def own_stall(self, event: OwnStall) -> None:
        """Count the time in which this endpoint did not run for nobody's silence."""
        now = self._outbox.now
        for link in self.by_session.values():
            link.heard_at = min(now, link.heard_at + event.seconds)
            link.begun_at = min(now, link.begun_at + event.seconds)

    def tick(self) -> None:
        """Lose silent peers, and send heartbeats to the others."""
        now = self._outbox.now
        for link in list(self.by_session.values()):
            if link.state is LinkState.GREETING:
                self._tick_greeting(link)
            elif link.state is LinkState.UP and now >= link.heard_at + self.config.silence_s:
                self.lose(link, FailureCode.PEER_SILENT, f"nothing heard from {link.peer}")
            elif link.state is LinkState.UP and now >= link.said_at + self.config.heartbeat_s:
                self.say(link, Heartbeat())

    def _tick_greeting(self, link: Link) -> None:
        if self._outbox.now >= link.begun_at + self.config.handshake_s:
            self.lose(link, FailureCode.UNREACHABLE, f"{link.peer} does not answer")

    def timers(self) -> Iterator[float]:
        """Yield when each link wants to be woken."""
        for link in self.by_session.values():
            if link.state is LinkState.GREETING:
                yield self._greeting_timer(link)
            elif link.state is LinkState.UP:
                yield link.heard_at + self.config.silence_s
                yield link.said_at + self.config.heartbeat_s

    def _greeting_timer(self, link: Link) -> float:
        return link.begun_at + self.config.handshake_s

    def check(self) -> None:
        """Every link is kept under its session, and none that is over is current."""
        for session, link in self.by_session.items():
            assert link.session == session, link
            assert link.state is not LinkState.GONE, link
        for peer, link in self.current.items():
            assert link.peer == peer, link
            assert link.state in (LinkState.GREETING, LinkState.UP), link
            assert self.by_session.get(link.session) is link, link
