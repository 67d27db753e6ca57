"""The handshake: everything that can't work is refused here, with a reason.

A target greets a source with what it holds and where it may be written. The
source derives the plan, reaches the target's memory by the best transport that both
have, and answers with the plan's digest and the transport; the target has derived the
same plan from what it knew of the source, and the two must agree. The answer
completes the session's name, so nothing that was said in an earlier session can
pass for this one, and a Hello that was delayed for ages leads nowhere.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Refused
from kvferry.fingerprint import difference
from kvferry.ids import Peer, Session
from kvferry.layout.layout import Layout
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Plan
from kvferry.plan.reshard import reshard
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.endpoint import Endpoint, Identity, Link
from kvferry.protocol.events import (
    Barred,
    Event,
    MemoryReached,
    MemoryUnreached,
    NewLife,
    Received,
    Send,
)
from kvferry.protocol.messages import (
    Body,
    Envelope,
    Heartbeat,
    Hello,
    RefusalCode,
    Refuse,
    Staging,
    TransportOffer,
    Welcome,
)
from kvferry.protocol.outcome import MAX_TEXT, FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance
from kvferry.protocol.transports import common_transports, none_common


class Greeter(Endpoint):
    """The target's half."""

    exposed: ClassVar[bool] = True

    def __init__(
        self, identity: Identity, config: ProtocolConfig, pools: PoolMap, staging: Staging
    ) -> None:
        super().__init__(identity, config)
        self.pools = pools
        self.staging = staging
        self._sessions = 0

    def _take(self, event: Event) -> None:
        match event:
            case Barred():
                self._on_barred(event)
            case NewLife():
                self._on_new_life(event)
            case _:
                super()._take(event)

    def _take_message(self, link: Link, body: Body) -> None:
        match body:
            case Welcome():
                self._on_welcome(link, body)
            case Refuse():
                self._on_refuse(link, body)
            case _:
                super()._take_message(link, body)

    @abstractmethod
    def _link_up(self, link: Link) -> None:
        """A link is up: offer what waited for it."""

    def _make_plan(self, other: Layout) -> Plan:
        return reshard(other, self.layout)

    def _link_to(self, peer: Peer, plan: Plan) -> Link:
        """The current link to a peer, or a new one with its Hello under way."""
        link = self.current.get(peer)
        if link and link.plan is not plan and link.plan.source != plan.source:
            self._lose(link, FailureCode.PEER_RESTARTED, f"{peer} has another layout now")
            link = None
        if link is None:
            self._sessions += 1
            session = Session(self.incarnation, self._sessions)
            now = self._now
            link = Link(peer, session, LinkState.GREETING, plan, None, now, now, now)
            self.links[session] = self.current[peer] = link
            self._greet(link)
        return link

    def _greet(self, link: Link) -> None:
        what = self.fingerprint, self.layout, self.pools, self.staging
        self._say(link, Hello(*what, self.metadata, self.transports))

    def _session_unknown(self, link: Link) -> None:
        """Proof: a source forgets a session only when none of its writes is in flight."""
        super()._session_unknown(link)
        if link.state is LinkState.LOST:
            self._gone(link)

    def _find(self, envelope: Envelope) -> Link | None:
        link = self.links.get(envelope.session)
        if link is None and isinstance(envelope.body, Welcome):
            link = self._name(envelope)
        return link

    def _name(self, envelope: Envelope) -> Link | None:
        """The greeting that a Welcome answers; from now on its session has both halves."""
        link = self.links.get(envelope.session.greeting)
        if link is None or link.peer != envelope.sender:
            return None
        del self.links[link.session]
        link.session = envelope.session
        self.links[link.session] = link
        return link

    def _on_welcome(self, link: Link, body: Welcome) -> None:
        if link.state is not LinkState.GREETING:
            return
        problem = self._misfit(link, body)
        if problem:
            self._note(link, problem)
            self._lose(link, FailureCode.REFUSED, f"{problem.code}: {problem.message}")
            return
        link.metadata, link.transport = body.metadata, body.transport
        link.state = advance(LINK, link.state, LinkStep.FITS)
        self._connected(link, self._offered(link.transport))
        before = link.seq_out
        self._link_up(link)
        if link.seq_out == before:
            # The source waits for a first frame with the whole session's name.
            self._say(link, Heartbeat())

    def _misfit(self, link: Link, body: Welcome) -> Refuse | None:
        if body.fingerprint != self.fingerprint:
            text = difference(body.fingerprint, self.fingerprint)
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
        return tuple(offer for offer in self.transports.held if offer.name == transport)

    def _on_refuse(self, link: Link, body: Refuse) -> None:
        self._lose(link, FailureCode.REFUSED, f"{body.code}: {body.message}")

    def _on_barred(self, event: Barred) -> None:
        link = self.current.get(event.peer)
        if link is not None and link.state is LinkState.GREETING:
            self._lose(link, FailureCode.REFUSED, event.message)

    def _on_new_life(self, event: NewLife) -> None:
        """Whoever had the name before may live for a while, but no new room is meant for it."""
        link = self.current.get(event.peer)
        if link is not None and link.incarnation not in (None, event.incarnation):
            self._lose(link, FailureCode.PEER_RESTARTED)

    def _tick_link(self, link: Link) -> None:
        if link.state is not LinkState.GREETING:
            super()._tick_link(link)
        elif self._now >= link.begun_at + self.config.handshake_s:
            self._lose(link, FailureCode.UNREACHABLE, f"{link.peer} does not answer")
        elif self._now >= link.said_at + self.config.resend_s:
            self._greet(link)

    def _link_timer(self, link: Link) -> float:
        if link.state is not LinkState.GREETING:
            return super()._link_timer(link)
        give_up_at = link.begun_at + self.config.handshake_s
        return min(give_up_at, link.said_at + self.config.resend_s)


class Welcomer(Endpoint):
    """The source's half."""

    exposed: ClassVar[bool] = False

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        super().__init__(identity, config)
        self._answers = 0

    def _take(self, event: Event) -> None:
        match event:
            case MemoryReached():
                self._on_reached(event)
            case MemoryUnreached():
                self._on_unreached(event)
            case _:
                super()._take(event)

    def _make_plan(self, other: Layout) -> Plan:
        return reshard(self.layout, other)

    def _on_received(self, event: Received) -> None:
        if isinstance(event.envelope.body, Hello):
            self._on_hello(event.envelope, event.envelope.body)
        else:
            super()._on_received(event)

    def _on_hello(self, envelope: Envelope, hello: Hello) -> None:
        session = envelope.session
        if session != session.greeting or session.target != envelope.incarnation:
            self.counts["stale"] += 1
            return
        known = (link for link in self.links.values() if link.session.greeting == session)
        link = next(known, None)
        if link is None:
            link = self._new_link(envelope, hello)
        elif link.peer != envelope.sender or not self._in_order(link, envelope):
            return
        if link is not None and link.state is not LinkState.LOST and link.transport:
            self._welcome(link)

    def _welcome(self, link: Link) -> None:
        what = self.fingerprint, self.layout, link.plan.digest
        self._say(link, Welcome(*what, self.metadata, link.transport))

    def _on_reached(self, event: MemoryReached) -> None:
        """Now it is known that this pair works, and by what."""
        link = self.links.get(event.session)
        if link is not None and link.state is LinkState.GREETING:
            link.transport = event.transport
            self._welcome(link)

    def _on_unreached(self, event: MemoryUnreached) -> None:
        link = self.links.get(event.session)
        if link is None or link.state is not LinkState.GREETING:
            return
        assert link.hello is not None
        known = common_transports(self.transports, link.hello.transports).problems
        text = none_common((*event.problems, *known))[:MAX_TEXT]
        self.counts["refused"] += 1
        refusal = Refuse(RefusalCode.TRANSPORT, text)
        self._do(Send(link.peer, self._envelope(link.session.greeting, 0, refusal)))
        self._lose(link, FailureCode.REFUSED, text)

    def _new_link(self, envelope: Envelope, hello: Hello) -> Link | None:
        """A link that counts once the target has answered; a late Hello never does."""
        peer, asked = envelope.sender, envelope.session
        refusal = self._refusal(peer, hello)
        if refusal:
            self.counts["refused"] += 1
            self._do(Send(peer, self._envelope(asked, 0, refusal)))
            return None
        for link in [link for link in self.links.values() if link.peer == peer]:
            if link.state is LinkState.GREETING:
                self._lose(link, FailureCode.SESSION_REPLACED)
        self._answers += 1
        session = Session(asked.target, asked.number, self.incarnation, self._answers)
        plan, now = self._plan_with(hello.layout), self._now
        link = Link(
            peer, session, LinkState.GREETING, plan, envelope.incarnation, now, now, now, hello
        )
        link.metadata, link.seq_in = hello.metadata, envelope.seq
        self.links[session] = link
        self._connected(link, common_transports(self.transports, hello.transports).offers)
        return link

    def _take_message(self, link: Link, body: Body) -> None:
        if isinstance(body, Refuse):
            self._on_refuse(link, body)
        else:
            super()._take_message(link, body)

    def _heard_from(self, link: Link) -> None:
        super()._heard_from(link)
        if link.state is LinkState.GREETING:
            self._confirm(link)

    def _confirm(self, link: Link) -> None:
        """The target lives and has our answer: this session replaces any other with it."""
        old = self.current.get(link.peer)
        if old is not None and old.session.answer > link.session.answer:
            # A delayed frame of a session that the target has replaced since.
            self._lose(link, FailureCode.SESSION_REPLACED)
            return
        link.state = advance(LINK, link.state, LinkStep.FITS)
        self.current[link.peer] = link
        if old is not None:
            restarted = old.incarnation != link.incarnation
            code = FailureCode.PEER_RESTARTED if restarted else FailureCode.SESSION_REPLACED
            self._lose(old, code)

    def _on_refuse(self, link: Link, body: Refuse) -> None:
        self._lose(link, FailureCode.REFUSED, f"{body.code}: {body.message}")

    def _tick_link(self, link: Link) -> None:
        if link.state is not LinkState.GREETING:
            super()._tick_link(link)
        elif self._now >= link.begun_at + self.config.handshake_s:
            self._lose(link, FailureCode.UNREACHABLE, f"{link.peer} does not answer")

    def _link_timer(self, link: Link) -> float:
        if link.state is not LinkState.GREETING:
            return super()._link_timer(link)
        return link.begun_at + self.config.handshake_s

    def _refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        """Why this pair can't work. Everything that can be known is known here."""
        others = sum(link.peer != peer for link in self.links.values())
        if others >= self.config.max_peers:
            return Refuse(RefusalCode.TOO_MANY_PEERS, f"{others} peers are connected")
        if hello.fingerprint != self.fingerprint:
            text = difference(self.fingerprint, hello.fingerprint)
            return Refuse(RefusalCode.FINGERPRINT, text[:MAX_TEXT])
        try:
            self._plan_with(hello.layout)
        except Refused as refused:
            return Refuse(RefusalCode.LAYOUT, str(refused)[:MAX_TEXT])
        problem = pools_problem(hello.layout, peer.rank, hello.pools)
        if problem:
            return Refuse(RefusalCode.POOLS, problem[:MAX_TEXT])
        common = common_transports(self.transports, hello.transports)
        if not common.offers:
            return Refuse(RefusalCode.TRANSPORT, none_common(common.problems)[:MAX_TEXT])
        return None
