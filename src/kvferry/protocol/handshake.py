"""The handshake: everything that can't work is refused here, with a reason.

A target greets a source with what it holds and where it may be written. The
source derives the plan and answers with its digest; the target has derived the
same plan from what it knew of the source, and the two must agree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Refused
from kvferry.ids import Peer, Session
from kvferry.layout.layout import Layout
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Plan
from kvferry.plan.reshard import reshard
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.endpoint import Endpoint, Link
from kvferry.protocol.events import Received, Send
from kvferry.protocol.messages import (
    Envelope,
    Hello,
    RefusalCode,
    Refuse,
    Staging,
    Welcome,
)
from kvferry.protocol.outcome import FailureCode
from kvferry.protocol.states import LINK, LinkState, LinkStep, advance


class Greeter(Endpoint):
    """The target's half."""

    MESSAGES: ClassVar[dict[type, str]] = Endpoint.MESSAGES | {
        Welcome: "_on_welcome",
        Refuse: "_on_refuse",
    }

    def __init__(
        self,
        me: Peer,
        incarnation: int,
        layout: Layout,
        fingerprint: str,
        config: ProtocolConfig,
        pools: PoolMap,
        staging: Staging,
    ) -> None:
        super().__init__(me, incarnation, layout, fingerprint, config)
        self.pools = pools
        self.staging = staging
        self._sessions = 0

    @abstractmethod
    def _link_up(self, link: Link) -> None:
        """A link is up: offer what waited for it."""

    def _make_plan(self, other: Layout) -> Plan:
        return reshard(other, self.layout)

    def _link_to(self, peer: Peer, plan: Plan) -> Link:
        """The current link to a peer, or a new one with its Hello under way."""
        link = self.current.get(peer)
        if link is None:
            self._sessions += 1
            session = Session(self.incarnation, self._sessions)
            now = self._now
            link = Link(peer, session, LinkState.GREETING, plan, None, now, now, now)
            self.links[session] = self.current[peer] = link
            self._greet(link)
        return link

    def _greet(self, link: Link) -> None:
        self._say(link, Hello(self.fingerprint, self.layout, self.pools, self.staging))

    def _on_welcome(self, link: Link, body: Welcome) -> None:
        if link.state is not LinkState.GREETING:
            return
        if body.fingerprint != self.fingerprint:
            self._lose(link, FailureCode.REFUSED, f"{link.peer} serves another model")
        elif body.layout != link.plan.source or body.digest != link.plan.digest:
            text = f"{link.peer} derived another plan; give both sides one version"
            self._lose(link, FailureCode.REFUSED, text)
        else:
            link.state = advance(LINK, link.state, LinkStep.FITS)
            self._link_up(link)

    def _on_refuse(self, link: Link, body: Refuse) -> None:
        self._lose(link, FailureCode.REFUSED, f"{body.code}: {body.message}"[:1000])

    def _tick_link(self, link: Link) -> None:
        if link.state is not LinkState.GREETING:
            super()._tick_link(link)
        elif self._now >= link.begun_at + self.config.handshake_s:
            self._lose(link, FailureCode.UNREACHABLE, f"{link.peer} does not answer")
        elif self._now >= link.said_at + self.config.resend_s:
            self._greet(link)

    def _link_timers(self, link: Link) -> Iterable[float]:
        if link.state is LinkState.GREETING:
            yield link.begun_at + self.config.handshake_s
            yield link.said_at + self.config.resend_s
        else:
            yield from super()._link_timers(link)


class Welcomer(Endpoint):
    """The source's half."""

    def _make_plan(self, other: Layout) -> Plan:
        return reshard(self.layout, other)

    def _on_received(self, event: Received) -> None:
        if isinstance(event.envelope.body, Hello):
            self._on_hello(event.envelope, event.envelope.body)
        else:
            super()._on_received(event)

    def _on_hello(self, envelope: Envelope, hello: Hello) -> None:
        link = self.links.get(envelope.session)
        if link is None:
            link = self._new_link(envelope, hello)
        elif link.peer != envelope.sender or not self._in_order(link, envelope):
            return
        if link is not None and link.state is LinkState.UP:
            link.heard_at = self._now
            self._say(link, Welcome(self.fingerprint, self.layout, link.plan.digest))

    def _new_link(self, envelope: Envelope, hello: Hello) -> Link | None:
        peer, session = envelope.sender, envelope.session
        old = self.current.get(peer)
        if old and self._is_older(session.target, session.number, old):
            self.counts["stale"] += 1
            return None
        refusal = self._refusal(peer, hello)
        if refusal:
            self.counts["refused"] += 1
            self._do(Send(peer, self._envelope(session, 0, refusal)))
            return None
        if old:
            restarted = old.incarnation != envelope.incarnation
            code = FailureCode.PEER_RESTARTED if restarted else FailureCode.SESSION_REPLACED
            self._lose(old, code)
        plan, now = self._plan_with(hello.layout), self._now
        link = Link(peer, session, LinkState.UP, plan, envelope.incarnation, now, now, now, hello)
        link.seq_in = envelope.seq
        self.links[session] = self.current[peer] = link
        return link

    def _is_older(self, incarnation: int, number: int, old: Link) -> bool:
        return incarnation == old.session.target and number < old.session.number

    def _refusal(self, peer: Peer, hello: Hello) -> Refuse | None:
        """Why this pair can't work. Everything that can be known is known here."""
        if len(self.links) >= self.config.max_peers:
            return Refuse(RefusalCode.TOO_MANY_PEERS, f"{len(self.links)} peers are connected")
        if hello.fingerprint != self.fingerprint:
            text = f"this prefill serves {self.fingerprint}, not {hello.fingerprint}"
            return Refuse(RefusalCode.FINGERPRINT, text[:1000])
        try:
            self._plan_with(hello.layout)
        except Refused as refused:
            return Refuse(RefusalCode.LAYOUT, str(refused)[:1000])
        problem = pools_problem(hello.layout, peer.rank, hello.pools)
        return Refuse(RefusalCode.POOLS, problem[:1000]) if problem else None
