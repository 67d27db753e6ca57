"""Links to peers: numbered frames, heartbeats, and detection of lost peers.

The frames of a link are numbered. A frame that arrives after a later one is dropped, so that
reordering becomes loss, and loss is repaired by resending what still matters. An Offer that was
overtaken by its own Abort can therefore do no harm. Arrival notes are sent when their writes have
ended; they are not numbered and may arrive in any order, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol

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
    Outbox,
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
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance

# Number of cached plans, one per pair of layouts.
MAX_PLANS = 64
# Heartbeats that are due within this part of their interval are sent together, so that a tick
# serves many links. Ticks look at every link, so a tick for each link would cost their square.
EARLY_BEAT = 1 / 4
# Number of drained attempts that a link remembers, and for how long.
MAX_DRAINED, DRAINED_S = 16384, 30.0


class Identity(msgspec.Struct, frozen=True):
    """Identity of an endpoint: its rank, incarnation, layout, model and transports.

    ``metadata`` is the endpoint's own data for every peer.
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

    ``incarnation`` is None until the peer's first frame. ``transport`` is empty until the
    target's memory was reached. ``heard_at`` is the last sign of life; it is later than
    ``last_frame_at`` if the peer's process was seen to run since. ``used_at`` is the time of the
    last frame that is no heartbeat.
    """

    peer: Peer
    session: Session
    state: LinkState
    plan: Plan
    incarnation: int | None
    heard_at: float
    sent_at: float
    begun_at: float
    hello: Hello | None = None
    metadata: bytes = b""
    last_frame_at: float = 0.0
    used_at: float = 0.0
    transport: str = ""
    # On a target: whether the source knows Ask.
    answers: bool = False
    seq_out: int = 0
    seq_in: int = 0
    connected: bool = False
    # On a source: attempts at rooms that were drained recently, and when.
    drained: dict[tuple[Room, Generation], float] = field(default_factory=dict)

    def remember_drained(self, room: Room, generation: Generation, now: float) -> None:
        """Remember an attempt for a while, so that repeated messages about it are recognized."""
        self.drained.pop((room, generation), None)
        self.drained[room, generation] = now
        oldest = next(iter(self.drained))
        while len(self.drained) > MAX_DRAINED or self.drained[oldest] < now - DRAINED_S:
            del self.drained[oldest]
            oldest = next(iter(self.drained))

    def __repr__(self) -> str:
        return f"<Link {self.peer} {self.session} {self.state}>"


class Dependents(Protocol):
    """Callbacks of a machine whose rooms depend on links."""

    def link_lost(self, link: Link, failure: Failure) -> None:
        """Fail the rooms that depend on a lost link."""

    def link_gone(self, link: Link) -> None:
        """Handle the proof that a lost peer no longer reads or writes memory."""

    def link_needed(self, link: Link) -> bool:
        """Whether a room still waits for something on a lost link."""


@lru_cache(maxsize=MAX_PLANS)
def plan_between(source: Layout, target: Layout) -> Plan:
    """Return the plan of two layouts, one object for all endpoints here. Raises ``Refused``."""
    return reshard(source, target)


class Links:
    """Every link of one endpoint. Subclasses add their half of the handshake."""

    # Whether this endpoint's layout is the source of its plans.
    sends: ClassVar[bool]

    def __init__(
        self, identity: Identity, config: ProtocolConfig, outbox: Outbox, rooms: Dependents
    ) -> None:
        self.identity = identity
        self.config = config
        self.by_session: dict[Session, Link] = {}
        self.current: dict[Peer, Link] = {}
        self._num_sessions = 0
        self._outbox = outbox
        self._rooms = rooms

    def plan_with(self, other: Layout) -> Plan:
        """Return the plan with a peer's layout. Raises ``Refused``."""
        mine = self.identity.layout
        return plan_between(mine, other) if self.sends else plan_between(other, mine)

    def send(self, link: Link, body: Body) -> None:
        """Send a numbered frame."""
        link.seq_out += 1
        link.sent_at = self._outbox.now
        if not isinstance(body, Heartbeat):
            link.used_at = link.sent_at
        self._outbox.do(Send(link.peer, self.envelope(link.session, link.seq_out, body)))

    def send_unnumbered(self, peer: Peer, session: Session, body: Body) -> None:
        """Send a frame that may arrive in any order."""
        self._outbox.do(Send(peer, self.envelope(session, 0, body)))

    def envelope(self, session: Session, seq: int, body: Body) -> Envelope:
        """Return a message with this endpoint as its sender."""
        return Envelope(self.identity.peer, self.identity.incarnation, session, seq, body)

    def receive(self, envelope: Envelope) -> Link | None:
        """Return the link of a frame whose body is to be handled; None if it is to be dropped."""
        link = self.find(envelope)
        if link is None or not self.in_order(link, envelope):
            return None
        self.heard(link)
        if not isinstance(envelope.body, Heartbeat):
            link.used_at = self._outbox.now
        return link if link.session in self.by_session else None

    def find(self, envelope: Envelope) -> Link | None:
        """Return the link that a frame belongs to; answer ``NoSession`` if there is none."""
        link = self._link_of(envelope)
        if link is None or link.peer != envelope.sender:
            self._outbox.counts["stale"] += 1
            # Only an established peer gets an answer: its session is over.
            if envelope.seq and not isinstance(envelope.body, NoSession | Hello):
                self.send_unnumbered(envelope.sender, envelope.session, NoSession())
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

    def _link_of(self, envelope: Envelope) -> Link | None:
        """Return the link of a frame's session."""
        return self.by_session.get(envelope.session)

    def _session_unknown(self, link: Link) -> None:
        """Handle a live peer's answer that it does not know the session."""
        self.lose(link, FailureCode.SESSION_REPLACED)

    def in_order(self, link: Link, envelope: Envelope) -> bool:
        """Whether no later frame of the link has arrived before this one."""
        if envelope.seq == 0:
            return True
        if envelope.seq <= link.seq_in:
            self._outbox.counts["overtaken"] += 1
            return False
        link.seq_in = envelope.seq
        return True

    def heard(self, link: Link) -> None:
        """Record that a frame has arrived in order."""
        link.heard_at = link.last_frame_at = self._outbox.now

    def wrong_version(self, event: WrongVersion) -> None:
        """Lose the link, or tell an unknown peer which version this is."""
        text = f"{event.sender} speaks version {event.version}, this is version {VERSION}"
        link = self.by_session.get(event.session)
        if link is not None and link.peer == event.sender:
            self.lose(link, FailureCode.REFUSED, f"{text}; run one version on both sides")
        elif not event.answered:
            self.send_unnumbered(event.sender, event.session, Refuse(RefusalCode.VERSION, text))

    def lose(self, link: Link, code: FailureCode, message: str = "") -> None:
        """Mark a link as lost. Memory that the peer may still write waits for proof."""
        if link.state in (LinkState.LOST, LinkState.GONE):
            return
        link.state = advance(LINK, link.state, LinkStep.LOSE)
        if self.current.get(link.peer) is link:
            del self.current[link.peer]
        if link.incarnation is not None:
            self._outbox.do(Disconnect(link.session))
        self._rooms.link_lost(link, Failure.of(code, message or f"lost {link.peer}"))
        self.drop_if_unneeded(link)

    def drop_if_unneeded(self, link: Link) -> None:
        """Remove a lost link if no room waits for anything on it."""
        if link.state is LinkState.LOST and not self._rooms.link_needed(link):
            self._unlink(link)

    def _unlink(self, link: Link) -> None:
        if self.by_session.pop(link.session, None) is not None and link.connected:
            self._outbox.do(Forget(link.session))

    def _connected(self, link: Link, transports: tuple[TransportOffer, ...]) -> None:
        """Emit Connect once the peer's identity is known."""
        assert link.incarnation is not None
        link.connected = True
        self._outbox.do(
            Connect(
                *(link.peer, link.incarnation, link.session, link.metadata), transports, link.hello
            )
        )

    def refused(self, link: Link, refusal: Refuse) -> None:
        """Lose a link whose peer has refused the handshake."""
        self.lose(link, FailureCode.REFUSED, f"{refusal.code}: {refusal.message}")

    def disconnected(self, event: Disconnected) -> None:
        """Handle the proof that nothing is in flight in a session."""
        link = self.by_session.get(event.session)
        if link is not None:
            self.lose(link, FailureCode.PEER_GONE)
            self.gone(link)

    def gone(self, link: Link) -> None:
        """Remove a lost link, with the proof that nothing of its session is in flight."""
        link.state = advance(LINK, link.state, LinkStep.GONE)
        self._unlink(link)
        self._rooms.link_gone(link)

    def peer_runs(self, event: PeerRuns) -> None:
        """Extend the silence timeout of a peer that runs, up to ``unresponsive_s``."""
        link, now = self.by_session.get(event.session), self._outbox.now
        if link is not None and now < link.last_frame_at + self.config.unresponsive_s:
            link.heard_at = max(link.heard_at, min(event.at, now))

    def own_stall(self, event: OwnStall) -> None:
        """Shift the timeouts by the time in which this endpoint did not run."""
        now = self._outbox.now
        for link in self.by_session.values():
            link.heard_at = min(now, link.heard_at + event.seconds)
            link.begun_at = min(now, link.begun_at + event.seconds)

    def tick(self) -> None:
        """Lose silent peers and send heartbeats to the others."""
        now, heartbeat_s = self._outbox.now, self.config.heartbeat_s
        if any(now >= link.sent_at + heartbeat_s for link in self.current.values()):
            heartbeat_s *= 1 - EARLY_BEAT
        for link in list(self.by_session.values()):
            if link.state is LinkState.GREETING:
                if now >= link.begun_at + self.config.handshake_s:
                    self.lose(link, FailureCode.UNREACHABLE, f"{link.peer} does not answer")
            elif link.state is LinkState.UP and now >= link.heard_at + self.config.silence_s:
                self.lose(link, FailureCode.PEER_SILENT, f"nothing heard from {link.peer}")
            elif link.state is LinkState.UP and now >= link.sent_at + heartbeat_s:
                self.send(link, Heartbeat())

    def timers(self) -> Iterator[float]:
        """Yield the times at which links need a tick."""
        for link in self.by_session.values():
            if link.state is LinkState.GREETING:
                yield link.begun_at + self.config.handshake_s
            elif link.state is LinkState.UP:
                yield link.heard_at + self.config.silence_s
                yield link.sent_at + self.config.heartbeat_s

    def check(self) -> None:
        """Check the keys of all links, and that no lost link is current."""
        for session, link in self.by_session.items():
            assert link.session == session, link
            assert link.state is not LinkState.GONE, link
        for peer, link in self.current.items():
            assert link.peer == peer, link
            assert link.state in (LinkState.GREETING, LinkState.UP), link
            assert self.by_session.get(link.session) is link, link
