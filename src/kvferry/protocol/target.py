"""The target machine: offers pages to sources and detects when a room is complete.

A room is done when the ledger covers the plan and every source has sent Close. A failed room is
reported at once, but its pages are released only when every inbound transfer is quiet and every
scatter has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse, Refused
from kvferry.ids import Generation, Op, Peer, Room
from kvferry.plan.content import room_proof
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Request
from kvferry.prefix import SPAN_TOKENS
from kvferry.protocol.credits import CreditBook
from kvferry.protocol.declines import Declined, Declines
from kvferry.protocol.events import (
    Cancel,
    ConnectRefused,
    Decline,
    Event,
    Instance,
    PeerRestarted,
    Proven,
    Receive,
    Release,
    Report,
    Scattered,
)
from kvferry.protocol.handshake import TargetLinks
from kvferry.protocol.inbound import ActiveScatters, InboundTransfer, InboundTransfers, TargetRoom
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Identity, Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import (
    MAX_CREDITS,
    Abort,
    Accept,
    Arrived,
    Body,
    Close,
    Complete,
    Credit,
    Drained,
    Grant,
    Heartbeat,
    Holding,
    Staging,
    Want,
    Welcome,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.proofs import TargetProofs
from kvferry.protocol.states import InboundState, InboundStep, LinkState


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """Classes of the parts of a target machine, so that tests can replace them."""

    links: type[TargetLinks] = TargetLinks
    inbounds: type[InboundTransfers] = InboundTransfers
    ledger: type[Ledger] = Ledger
    credits: type[CreditBook] = CreditBook
    scatters: type[ActiveScatters] = ActiveScatters
    declines: type[Declines] = Declines
    proofs: type[TargetProofs] = TargetProofs


PARTS = TargetParts()
ABORTED = Failure.of(FailureCode.ABORTED, "given up at decode")


class TargetMachine(Machine):
    """Protocol state machine of one target rank."""

    exposed: ClassVar[bool] = True

    def __init__(
        self,
        identity: Identity,
        config: ProtocolConfig,
        pools: PoolMap,
        staging: Staging,
        parts: TargetParts = PARTS,
    ) -> None:
        super().__init__(identity, config)
        self.rooms: dict[Room, TargetRoom] = {}
        self.staging = staging
        self.peers: TargetLinks = parts.links(identity, config, self.outbox, self, pools, staging)
        self.inbounds = parts.inbounds(self.rooms, self.peers, self.outbox)
        self.credits = parts.credits(staging.num_slots, config.credits_per_source)
        self.scatters = parts.scatters(self.outbox)
        self.declines = parts.declines(self.peers, self.outbox)
        self.proofs = parts.proofs(self.me.rank, self.outbox)
        self._new_ledger = parts.ledger
        self._generations = 0
        self._proven_part = config.proof_rooms, config.proof_share

    def _on_event(self, event: Event) -> None:
        match event:
            case Receive():
                self._on_receive(event)
            case Scattered():
                self._on_scattered(event.op)
            case Proven():
                for proven, failure in self.proofs.end(event):
                    if failure is not None:
                        self._fail(proven, failure)
                    self._end_if_possible(proven)
            case Cancel():
                room = self.rooms.get(event.room)
                if room:
                    self._fail(room, event.failure or ABORTED)
            case Decline():
                self._on_decline(event)
            case ConnectRefused():
                self.peers.connect_refused(event)
            case PeerRestarted():
                self.peers.peer_restarted(event)
            case _:
                super()._on_event(event)

    def _on_message(self, link: Link, body: Body) -> None:
        match body:
            case Arrived():
                self._on_arrived(link, body)
            case Close():
                self._on_close(link, body)
            case Accept():
                inbound = self.inbounds.find(link, body)
                if inbound:
                    inbound.answered()
            case Want():
                self._on_want(link, body)
            case Holding():
                self._on_length(self.inbounds.find(link, body), body.num_tokens)
            case Abort():
                inbound = self.inbounds.find(link, body)
                if inbound:
                    self._fail(inbound.room, body.failure)
            case Drained():
                self._on_drained(link, body)
            case Welcome():
                if self.peers.welcomed(link, body):
                    self._link_up(link)
            case _:
                super()._on_message(link, body)

    def _on_receive(self, event: Receive) -> None:
        wanted = event.wanted
        if event.room in self.rooms:
            raise Misuse(f"room {event.room!r} is already being received; use another id")
        failure = self._room_refusal(event.deadline, len(self.rooms))
        failure = failure or self.inbounds.token_refusal(wanted.request)
        if failure and failure.code is not FailureCode.DEADLINE:
            self._decline(event.room, event.prefill, failure)
        failure = failure or self.peers.prefill_refusal(event.prefill)
        if failure:
            self.outbox.do(Report(event.room, failure))
            self.outbox.do(Release(event.room))
            return
        plan = self.peers.plan_with(event.prefill.layout)
        self._generations += 1
        room = TargetRoom(
            wanted.room,
            wanted,
            generation=Generation(self._generations),
            plan=plan,
            ledger=self._new_ledger(plan, self.me.rank, wanted.request, wanted.digest),
            proof=room_proof(self.incarnation, self._generations, *self._proven_part),
        )
        self.rooms[room.name] = room
        for source in plan.contacts(self.me.rank):
            link = self.peers.link_to(Peer(event.prefill.name, source), plan)
            room.inbounds[source] = InboundTransfer(room, source, link, self.outbox.now)
        for inbound in room.inbounds.values():
            if inbound.link.state is LinkState.UP:
                self._begin(inbound)

    def _begin(self, inbound: InboundTransfer) -> None:
        """Send a waiting transfer's first message over its link, which is up."""
        room = inbound.room
        if inbound.state is not InboundState.CONNECTING:
            return
        if room.wanted.chain is None:
            self.inbounds.offer(inbound)
        elif inbound.source == room.plan.source.lead:
            self.inbounds.ask(inbound)
            if not inbound.link.answers:
                self._on_length(inbound, 0)

    def _on_length(self, inbound: InboundTransfer | None, num_tokens: int) -> None:
        """Go on with a pull whose length the lead answers: offer it, or end it if it is 0."""
        if inbound is None or inbound.state is not InboundState.ASKING:
            return
        room, chain = inbound.room, inbound.room.wanted.chain
        assert chain is not None
        if num_tokens > chain.num_tokens or num_tokens % SPAN_TOKENS:
            text = f"{inbound.link.peer} answers {num_tokens} tokens of {chain.num_tokens}"
            self._fail(room, Failure.of(FailureCode.BAD_NOTE, text))
            return
        room.pulled = num_tokens
        if num_tokens == 0:
            # No source has an offer, and none has opened the room.
            self._end_if_possible(room)
            return
        request = Request(num_tokens, min(room.wanted.request.prefix, num_tokens))
        digest = chain.digest(num_tokens)
        room.wanted = replace(room.wanted, request=request, digest=digest, chain=None)
        room.ledger = self._new_ledger(room.plan, self.me.rank, request, digest)
        for one in room.inbounds.values():
            if one.link.state is LinkState.UP:
                self.inbounds.offer(one)

    def _on_decline(self, event: Decline) -> None:
        if event.room in self.rooms:
            raise Misuse(f"room {event.room!r} is being received; abort it instead")
        failure = Failure.of(FailureCode.ABORTED, "not wanted at decode")
        self._decline(event.room, event.prefill, failure)

    def _decline(self, name: Room, prefill: Instance, failure: Failure) -> None:
        """Tell every source of a room that this target will not receive it."""
        try:
            plan = self.peers.plan_with(prefill.layout)
        except Refused:
            # This instance can't send anything to this target.
            return
        self._generations += 1
        for source in plan.contacts(self.me.rank):
            link = self.peers.link_to(Peer(prefill.name, source), plan)
            generation = Generation(self._generations)
            self.declines.add(Declined(link, name, generation, failure))
        self.declines.send()

    def _link_up(self, link: Link) -> None:
        """Send the offers that waited for the link."""
        before = link.seq_out
        for inbound in self.inbounds.of(link):
            self._begin(inbound)
        self.declines.send()
        if link.seq_out == before:
            # The source waits for a first frame with the complete session id.
            self.peers.send(link, Heartbeat())

    def _on_want(self, link: Link, body: Want) -> None:
        inbound = self.inbounds.find(link, body)
        if inbound and not inbound.room.failure:
            inbound.answered()
            self.credits.want(inbound.account, body.total, len(inbound.room.inbounds))
            self._send_grant(inbound)

    def _send_grant(self, inbound: InboundTransfer) -> None:
        outstanding = self.credits.outstanding(inbound.account)
        promised = tuple(Credit(serial, slot) for serial, slot in outstanding.items())
        if promised:
            room = inbound.room
            self.peers.send(inbound.link, Grant(room.name, room.generation, promised[:MAX_CREDITS]))

    def _on_arrived(self, link: Link, body: Arrived) -> None:
        inbound = self.inbounds.find(link, body)
        if not inbound or inbound.room.failure:
            return
        room = inbound.room
        if not inbound.owes(body, self.me.rank, self.staging.slot_bytes):
            text = f"{link.peer} sent what it does not owe, or more than a slot holds"
            self._fail(room, Failure.of(FailureCode.BAD_NOTE, text))
            return
        inbound.answered()
        if body.serial is None:
            room.ledger.add_all(inbound.source, body.blocks)
            self._end_if_possible(room)
            return
        slot = self.credits.use(inbound.account, body.serial)
        if slot is not None:
            self.scatters.begin(inbound, body, slot)
            self._end_if_possible(room)

    def _on_scattered(self, op: Op) -> None:
        done = self.scatters.end(op)
        if done is not None:
            self.credits.scattered(done.slot)
            done.room.ledger.add_all(done.source, done.blocks)
            self._end_if_possible(done.room)

    def _on_close(self, link: Link, body: Close) -> None:
        inbound = self.inbounds.find(link, body)
        if inbound is None:
            # The room has ended here and its Complete was lost.
            self.peers.send(link, Complete(body.room, body.generation))
            return
        room = inbound.room
        if room.failure or inbound.state is InboundState.QUIET:
            return
        problem = room.ledger.problem(body)
        if not all(room.ledger.owes(inbound.source, block) for block in body.written):
            text = f"{link.peer} wrote what it did not owe"
            problem = problem or Failure.of(FailureCode.BAD_NOTE, text)
        if problem:
            self._fail(room, problem)
            return
        inbound.step(InboundStep.CLOSED)
        inbound.confirmed = True
        if body.metadata is not None:
            room.metadata = body.metadata
        inbound.sums = body.sums
        room.ledger.close(inbound.source)
        room.ledger.add_all(inbound.source, body.written)
        self._end_if_possible(room)

    def _on_drained(self, link: Link, body: Drained) -> None:
        inbound = self.inbounds.find(link, body)
        if not inbound:
            self.declines.answered(link, body.room, body.generation)
            return
        if body.heard >= inbound.offer_seq:
            # The source has received the latest Offer, so no other can reach it.
            self._mark_quiet(inbound)
        self._fail(inbound.room, body.failure)

    def _fail(self, room: TargetRoom, failure: Failure) -> None:
        """Report the failure, tell every source, and wait for their proof."""
        if room.failure is None:
            room.failure = failure
            self.outbox.do(Report(room.name, failure, room.unusable()))
            for inbound in room.inbounds.values():
                link = inbound.link
                has_link = link.state in (LinkState.GREETING, LinkState.UP)
                if not inbound.is_offered and has_link:
                    # The source has no offer: abort the room there, once the link is up.
                    self.declines.add(Declined(link, room.name, room.generation, failure))
                inbound.step(InboundStep.FAIL)
                if link.state is LinkState.GONE:
                    self._mark_quiet(inbound)
                elif inbound.state is InboundState.DRAINING:
                    self.inbounds.abort(inbound)
                self.credits.stop(inbound.account)
            self.declines.send()
        self._end_if_possible(room)

    def _mark_quiet(self, inbound: InboundTransfer) -> None:
        """Record the proof that a source writes nothing more for a room."""
        inbound.step(InboundStep.QUIET)
        self.credits.settle(inbound.account)

    def _end_if_possible(self, room: TargetRoom) -> None:
        """End a room that is complete, or that has failed and is provably not written any more."""
        if self.rooms.get(room.name) is not room:
            return
        proven = room.failure is not None or self.proofs.prove(room)
        if self.scatters.writes(room) or self.proofs.reads(room):
            return
        if room.failure is None:
            if room.pulled != 0:
                if not (room.ledger.complete and proven):
                    return
                for inbound in room.inbounds.values():
                    self.peers.send(inbound.link, Complete(room.name, room.generation))
            self.outbox.do(Report(room.name, Done(room.metadata, room.pulled)))
        elif not self.inbounds.is_quiet(room):
            return
        for inbound in room.inbounds.values():
            self.credits.settle(inbound.account)
        del self.rooms[room.name]
        for inbound in room.inbounds.values():
            self.peers.drop_if_unneeded(inbound.link)
        # They refer to the room, so only the garbage collector would free them.
        room.inbounds = {}
        self.outbox.do(Release(room.name))

    def link_lost(self, link: Link, failure: Failure) -> None:
        """Fail the rooms to which a lost source still owes something."""
        self.declines.lost(link)
        for inbound in self.inbounds.of(link):
            # A source that has delivered everything may leave.
            if not inbound.has_delivered:
                self._fail(inbound.room, failure)

    def link_gone(self, link: Link) -> None:
        """End the failed rooms that waited for proof from this source."""
        for inbound in self.inbounds.of(link):
            if inbound.room.failure:
                self._mark_quiet(inbound)
                self._end_if_possible(inbound.room)

    def link_needed(self, link: Link) -> bool:
        """Whether a room still waits for this source."""
        return any(inbound.state is not InboundState.QUIET for inbound in self.inbounds.of(link))

    def _settle(self) -> None:
        for name, source in self.credits.grant():
            self._send_grant(self.rooms[name].inbounds[source])

    def _on_tick(self) -> None:
        self.declines.send()
        for room in list(self.rooms.values()):
            if room.failure is None and self.outbox.now >= room.wanted.deadline:
                self._fail(room, room.expired())
            for inbound in room.inbounds.values():
                if self.outbox.now >= self.inbounds.repeat_at(inbound):
                    serials = tuple(self.credits.outstanding(inbound.account))
                    self.inbounds.repeat(inbound, serials)

    def _timers(self) -> Iterable[float]:
        yield from self.declines.timers()
        for room in self.rooms.values():
            if room.failure is None:
                yield room.wanted.deadline
            yield from map(self.inbounds.repeat_at, room.inbounds.values())

    def check(self) -> None:
        """Check the invariants of every part."""
        self.peers.check()
        self.inbounds.check()
        self.credits.check()
        self.scatters.check()
        self.declines.check()
        self.proofs.check()
        for room in self.rooms.values():
            room.ledger.check()
