"""The handshake between a target and a source. It refuses every combination that can't work.

The target sends Hello with its layout, memory and transports. The source derives the plan,
connects to the target's memory with the best common transport, and answers Welcome with the
plan's digest and the transport. The target has derived its own plan from the source's registered
layout, and the two digests must be equal. The Welcome completes the session id, so that no frame
of an earlier session matches this one and a delayed Hello has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Refused
from kvferry.fingerprint import difference
from kvferry.ids import Peer, Session
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Plan
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.events import ConnectRefused, Instance, MemoryReached, Outbox, PeerRestarted
from kvferry.protocol.links import Dependents, Identity, Link, Links
from kvferry.protocol.messages import (
    Envelope,
    Hello,
    NoSession,
    RefusalCode,
    Refuse,
    Staging,
    TransportOffer,
    Welcome,
)
from kvferry.protocol.outcome import MAX_TEXT, Failure, FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance
from kvferry.protocol.transports import common_transports, no_transport_message


class TargetLinks(Links):
    """Links of a target, which starts the handshake."""

    sends: ClassVar[bool] = False

    def __init__(
        self,
        identity: Identity,
        config: ProtocolConfig,
        outbox: Outbox,
        rooms: Dependents,
        pools: PoolMap,
        staging: Staging,
    ) -> None:
        super().__init__(identity, config, outbox, rooms)
        self._pools = pools
        self._staging = staging

    def prefill_refusal(self, prefill: Instance) -> Failure | None:
        """Return why a target can't receive from a prefill instance, before any handshake."""
        if prefill.fingerprint != self.identity.fingerprint:
            text = difference(prefill.fingerprint, self.identity.fingerprint)
            return Failure.of(FailureCode.REFUSED, text)
        try:
            self.plan_with(prefill.layout)
        except Refused as refused:
            return Failure.of(FailureCode.REFUSED, str(refused))
        return None

    def link_to(self, peer: Peer, plan: Plan) -> Link:
        """Return the current link to a peer, or a new one after sending Hello."""
        link = self.current.get(peer)
        if link and link.plan is not plan and link.plan.source != plan.source:
            self.lose(link, FailureCode.PEER_RESTARTED, f"{peer} has another layout now")
            link = None
        if link is None:
            self._num_sessions += 1
            session, now = Session(self.identity.incarnation, self._num_sessions), self._outbox.now
            link = Link(peer, session, LinkState.GREETING, plan, None, now, now, now)
            self.by_session[session] = self.current[peer] = link
            self._send_hello(link)
        return link

    def _send_hello(self, link: Link) -> None:
        me = self.identity
        memory = self._pools, self._staging
        self.send(link, Hello(me.fingerprint, me.layout, *memory, me.metadata, me.transports))

    def _session_unknown(self, link: Link) -> None:
        """Take this as proof: a source forgets a session only when no write of it is in flight."""
        super()._session_unknown(link)
        if link.state is LinkState.LOST:
            self.gone(link)

    def _link_of(self, envelope: Envelope) -> Link | None:
        """Return the link of a frame; a Welcome completes the session id of its Hello."""
        link = super()._link_of(envelope)
        if link is not None or not isinstance(envelope.body, Welcome):
            return link
        link = self.by_session.get(envelope.session.greeting)
        if link is None or link.peer != envelope.sender:
            return None
        del self.by_session[link.session]
        link.session = envelope.session
        self.by_session[link.session] = link
        return link

    def welcomed(self, link: Link, body: Welcome) -> bool:
        """Handle a Welcome; return whether the link is now up."""
        if link.state is not LinkState.GREETING:
            return False
        problem = self._welcome_problem(link, body)
        if problem:
            self.send_unnumbered(link.peer, link.session, problem)
            self.refused(link, problem)
            return False
        link.metadata, link.transport = body.metadata, body.transport
        link.answers = body.answers
        link.state = advance(LINK, link.state, LinkStep.FITS)
        self._connected(link, self._offered(link.transport))
        return True

    def _welcome_problem(self, link: Link, body: Welcome) -> Refuse | None:
        if body.fingerprint != self.identity.fingerprint:
            text = difference(body.fingerprint, self.identity.fingerprint)
            return Refuse(RefusalCode.FINGERPRINT, text[:MAX_TEXT])
        if body.layout != link.plan.source:
            text = f"{link.peer} has another layout than the one it registered"
            return Refuse(RefusalCode.LAYOUT, text)
        if body.digest != link.plan.digest:
            text = f"{link.peer} derived another plan; run one version on both sides"
            return Refuse(RefusalCode.DIGEST, text)
        if not self._offered(body.transport):
            text = f"{link.peer} writes by {body.transport}, which it was not offered"
            return Refuse(RefusalCode.TRANSPORT, text)
        return None

    def _offered(self, transport: str) -> tuple[TransportOffer, ...]:
        held = self.identity.transports.held
        return tuple(offer for offer in held if offer.name == transport)

    def connect_refused(self, event: ConnectRefused) -> None:
        """Give up the handshake with a source that refuses the connection."""
        link = self.current.get(event.peer)
        if link is not None and link.state is LinkState.GREETING:
            self.lose(link, FailureCode.REFUSED, event.message)

    def peer_restarted(self, event: PeerRestarted) -> None:
        """Lose the link to an earlier incarnation, even if that is still alive."""
        link = self.current.get(event.peer)
        if link is not None and link.incarnation not in (None, event.incarnation):
            self.lose(link, FailureCode.PEER_RESTARTED)

    def tick(self) -> None:
        """Lose silent peers, close idle links, repeat Hellos, and send heartbeats."""
        for link in [link for link in self.current.values() if self.is_idle(link)]:
            # The source then forgets the session too. If this is lost, it learns it from the
            # answer to its next heartbeat.
            self.send_unnumbered(link.peer, link.session, NoSession())
            self.lose(link, FailureCode.SESSION_REPLACED, f"the link to {link.peer} was idle")
        super().tick()
        for link in self._greeting():
            if self._outbox.now >= link.sent_at + self.config.resend_s:
                self._send_hello(link)

    def timers(self) -> Iterator[float]:
        """Yield the times at which links need a tick."""
        yield from super().timers()
        yield from (link.sent_at + self.config.resend_s for link in self._greeting())

    def _greeting(self) -> list[Link]:
        return [link for link in self.current.values() if link.state is LinkState.GREETING]

    def is_idle(self, link: Link) -> bool:
        """Whether no room has used a link for ``idle_s``, nor may use it now.

        Only the target may judge this, because it starts each room. It repeats its messages for
        an open room more often, so the check of its rooms is a second line of defence.
        """
        since_s = self._outbox.now - link.used_at
        is_unused = link.state is LinkState.UP and since_s >= self.config.idle_s
        return is_unused and not self._rooms.link_needed(link)


class SourceLinks(Links):
    """Links of a source, which answers Hello."""

    sends: ClassVar[bool] = True

    def __init__(
        self, identity: Identity, config: ProtocolConfig, outbox: Outbox, rooms: Dependents
    ) -> None:
        super().__init__(identity, config, outbox, rooms)
        # Many targets may send Hello at once, so none of these looks at every link.
        self._by_greeting: dict[Session, Link] = {}
        self._greeted: dict[Peer, Link] = {}

    def receive(self, envelope: Envelope) -> Link | None:
        """Answer a Hello; return the link of any other frame."""
        if isinstance(envelope.body, Hello):
            self._on_hello(envelope, envelope.body)
            return None
        return super().receive(envelope)

    def _on_hello(self, envelope: Envelope, hello: Hello) -> None:
        session = envelope.session
        if session != session.greeting or session.target != envelope.incarnation:
            self._outbox.counts["stale"] += 1
            return
        link = self._by_greeting.get(session)
        if link is None:
            link = self._new_link(envelope, hello)
        elif link.peer != envelope.sender or not self.in_order(link, envelope):
            return
        if link is not None and link.state is not LinkState.LOST and link.transport:
            self.welcome(link)

    def welcome(self, link: Link) -> None:
        """Send Welcome."""
        me = self.identity
        about = me.fingerprint, me.layout, link.plan.digest, me.metadata
        self.send(link, Welcome(*about, link.transport, answers=True))

    def reached(self, event: MemoryReached) -> None:
        """Answer the Hello: welcome the target, or refuse it if no transport could connect."""
        link = self.by_session.get(event.session)
        if link is None or link.state is not LinkState.GREETING:
            return
        if event.transport:
            link.transport = event.transport
            self.welcome(link)
            return
        assert link.hello is not None
        known = common_transports(self.identity.transports, link.hello.transports).problems
        text = no_transport_message((*event.problems, *known))[:MAX_TEXT]
        self._refuse(link.peer, link.session.greeting, Refuse(RefusalCode.TRANSPORT, text))
        self.lose(link, FailureCode.REFUSED, text)

    def _refuse(self, peer: Peer, greeting: Session, refusal: Refuse) -> None:
        self._outbox.counts["refused"] += 1
        self.send_unnumbered(peer, greeting, refusal)

    def _new_link(self, envelope: Envelope, hello: Hello) -> Link | None:
        """Return a new link, which becomes current once the target has answered the Welcome."""
        peer, greeting, now = envelope.sender, envelope.session, self._outbox.now
        refusal = self.refusal(peer, hello)
        if refusal:
            self._refuse(peer, greeting, refusal)
            return None
        former = self._greeted.get(peer)
        if former is not None and former.state is LinkState.GREETING:
            self.lose(former, FailureCode.SESSION_REPLACED)
        self._num_sessions += 1
        me = self.identity.incarnation
        session = Session(greeting.target, greeting.number, me, self._num_sessions)
        plan = self.plan_with(hello.layout)
        link = Link(
            peer, session, LinkState.GREETING, plan, envelope.incarnation, now, now, now, hello
        )
        link.metadata, link.seq_in = hello.metadata, envelope.seq
        self.by_session[session] = self._by_greeting[greeting] = self._greeted[peer] = link
        self._connected(link, common_transports(self.identity.transports, hello.transports).offers)
        return link

    def _unlink(self, link: Link) -> None:
        super()._unlink(link)
        self._by_greeting.pop(link.session.greeting, None)
        if self._greeted.get(link.peer) is link:
            del self._greeted[link.peer]

    def heard(self, link: Link) -> None:
        """Record a frame; the first one with the complete session id confirms the session."""
        super().heard(link)
        if link.state is LinkState.GREETING:
            self._confirm(link)

    def _confirm(self, link: Link) -> None:
        """Make this link current. It replaces an earlier session with the target."""
        old = self.current.get(link.peer)
        if old is not None and old.session.answer > link.session.answer:
            # A delayed frame of a session that the target has replaced.
            self.lose(link, FailureCode.SESSION_REPLACED)
            return
        link.state = advance(LINK, link.state, LinkStep.FITS)
        self.current[link.peer] = link
        if old is not None:
            restarted = old.incarnation != link.incarnation
            code = FailureCode.PEER_RESTARTED if restarted else FailureCode.SESSION_REPLACED
            self.lose(old, code)

    def refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        """Return why this source can't serve the target."""
        others = len(self.by_session)
        if others >= self.config.max_peers:
            others = sum(link.peer != peer for link in self.by_session.values())
        if others >= self.config.max_peers:
            return Refuse(RefusalCode.TOO_MANY_PEERS, f"{others} peers are connected")
        if hello.fingerprint != self.identity.fingerprint:
            text = difference(self.identity.fingerprint, hello.fingerprint)
            return Refuse(RefusalCode.FINGERPRINT, text[:MAX_TEXT])
        try:
            self.plan_with(hello.layout)
        except Refused as refused:
            return Refuse(RefusalCode.LAYOUT, str(refused)[:MAX_TEXT])
        problem = pools_problem(hello.layout, peer.rank, hello.pools)
        if problem:
            return Refuse(RefusalCode.POOLS, problem[:MAX_TEXT])
        common = common_transports(self.identity.transports, hello.transports)
        if not common.offers:
            return Refuse(RefusalCode.TRANSPORT, no_transport_message(common.problems)[:MAX_TEXT])
        return None
