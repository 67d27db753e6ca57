"""The source machine: writes the cache of a room to its targets.

A push becomes blocks for every target that has sent an offer. Their transfer mode is requested
with an action. Staged blocks wait for a credit; if none arrives in time they are written directly,
because staging is only an optimisation. Close is sent when the engine has finished and every
write has ended. A failed room stops at once, and its pages are released when the last write that
reads them has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Room
from kvferry.layout.intervals import Span
from kvferry.protocol.admission import SourceAdmission
from kvferry.protocol.asks import Asks
from kvferry.protocol.events import (
    Cancel,
    Chosen,
    Event,
    Finish,
    Held,
    MemoryReached,
    Open,
    Prepare,
    Proven,
    Push,
    Release,
    Report,
    TransferRequest,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.handshake import SourceLinks
from kvferry.protocol.links import Identity, Link
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Ask,
    Body,
    Complete,
    Grant,
    Offer,
    RoomMessage,
    StatusPoll,
)
from kvferry.protocol.outbound import OutboundTransfer, OutboundTransfers, SourceRoom
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.proofs import SourceProofs
from kvferry.protocol.slots import EarlyGather, InFlight, LocalSlots
from kvferry.protocol.states import (
    OUTBOUND,
    SOURCE_ROOM,
    LinkState,
    OutboundState,
    OutboundStep,
    RoomState,
    SourceRoomStep,
    advance,
)
from kvferry.protocol.writes import WriteQueue


@dataclass(frozen=True, kw_only=True)
class SourceParts:
    """Classes of the parts of a source machine, so that tests can replace them."""

    links: type[SourceLinks] = SourceLinks
    admission: type[SourceAdmission] = SourceAdmission
    asks: type[Asks] = Asks
    outbounds: type[OutboundTransfers] = OutboundTransfers
    slots: type[LocalSlots] = LocalSlots
    gather: type[EarlyGather] = EarlyGather
    writes: type[WriteQueue] = WriteQueue
    proofs: type[SourceProofs] = SourceProofs


PARTS = SourceParts()
ABORTED = Failure.of(FailureCode.ABORTED, "given up at prefill")


class SourceMachine(Machine):
    """Protocol state machine of one source rank."""

    exposed: ClassVar[bool] = False

    def __init__(
        self, identity: Identity, config: ProtocolConfig, parts: SourceParts = PARTS
    ) -> None:
        super().__init__(identity, config)
        self.rooms: dict[Room, SourceRoom] = {}
        self.peers: SourceLinks = parts.links(identity, config, self.outbox, self)
        self.admission = parts.admission(self.me.rank, self.rooms, config)
        self.asks = parts.asks(self.peers, self.outbox, config)
        self.outbounds = parts.outbounds(self.rooms, self.peers, self.outbox)
        self.inflight = InFlight(parts.slots(config.local_slots))
        shared = self.peers, self.outbox, self.inflight
        self.writes = parts.writes(*shared, parts.gather(*shared))
        self.proofs = parts.proofs(self.outbox)

    def _on_event(self, event: Event) -> None:
        match event:
            case Push():
                self._on_push(event)
            case Chosen():
                self.writes.chosen(event)
            case WriteEnded():
                self._on_write_ended(event)
            case Proven():
                self._on_proven(event)
            case Open():
                self._on_open(event)
            case Finish():
                self._on_finish(event)
            case Prepare():
                self._on_prepare(event)
            case Cancel():
                self._on_cancel(event)
            case Held():
                self.asks.held(event)
            case MemoryReached():
                self.peers.reached(event)
            case _:
                super()._on_event(event)

    def _on_message(self, link: Link, body: Body) -> None:
        match body:
            case Offer():
                self._on_offer(link, body)
            case Ask():
                self._on_ask(link, body)
            case Grant():
                outbound = self.outbounds.find(link, body)
                if outbound is not None:
                    self.writes.grant(outbound, body.credits)
            case Complete():
                self._on_complete(link, body)
            case StatusPoll():
                self.outbounds.status_polled(link, body)
            case Abort():
                self._on_abort(link, body)
            case _:
                super()._on_message(link, body)

    def _on_open(self, event: Open) -> None:
        room = self.rooms.get(event.room)
        if room and room.known_to_engine:
            raise Misuse(f"room {event.room!r} is open already; use another id")
        failure = self._room_refusal(event.deadline, len(self.rooms) - (room is not None))
        if room is None or room.state is RoomState.OVER:
            room = SourceRoom(event.room, RoomState.OPEN, event.deadline)
            self.rooms[event.room] = room
        else:
            room.state = advance(SOURCE_ROOM, room.state, SourceRoomStep.OPEN)
            room.deadline = event.deadline
        if room.state is RoomState.FAILING:
            assert room.failure is not None
            self.outbox.do(Report(room.name, room.failure))
            self._drain(room)
        elif failure:
            self._fail(room, failure)

    def _open_room(self, name: Room, call: str) -> SourceRoom | None:
        """Return the room of an engine's call; None if it has failed meanwhile."""
        room = self.rooms.get(name)
        if room is None or room.failure or not room.known_to_engine:
            # The engine's call has crossed the report of the failure.
            self.counts["late"] += 1
            return None
        if room.state is not RoomState.OPEN:
            raise Misuse(f"room {name!r} is {room.state}; it can't {call}")
        return room

    def _on_prepare(self, event: Prepare) -> None:
        room = self._open_room(event.room, "prepare")
        for outbound in room.outbounds.values() if room else ():
            self.writes.prepare(outbound, event)

    def _on_push(self, event: Push) -> None:
        room = self._open_room(event.room, "push")
        if room is None:
            return
        layers = Span(0, self.layout.spec.num_layers) if event.layers is None else event.layers
        room.pushed.check(event, layers)
        room.pushed.add(event, layers)
        room.pushes.append(event)
        for outbound in room.outbounds.values():
            self.writes.push(outbound, event)

    def _on_finish(self, event: Finish) -> None:
        room = self._open_room(event.room, "finish")
        if room is None:
            return
        room.state = advance(SOURCE_ROOM, room.state, SourceRoomStep.FINISH)
        room.finish = event
        for outbound in list(room.outbounds.values()):
            self.writes.push_rest(outbound, event)
        self._fail_unless_pushed(room)
        for outbound in room.outbounds.values():
            self.proofs.begin(outbound)

    def _on_cancel(self, event: Cancel) -> None:
        room = self.rooms.get(event.room)
        if room and room.known_to_engine:
            self._fail(room, event.failure or ABORTED)

    def _on_ask(self, link: Link, ask: Ask) -> None:
        room = self.rooms.get(ask.room)
        refusal = self.asks.refusal(link, room, ask)
        if refusal is None:
            self.asks.ask(link, ask)
            return
        if room is not None:
            self.admission.record_late_target(room, link)
        self.outbounds.drained(link, ask, refusal)

    def _on_offer(self, link: Link, offer: Offer) -> None:
        room = self.rooms.get(offer.room)
        if self.outbounds.find(link, offer):
            self.peers.send(link, Accept(offer.room, offer.generation))
            return
        owed = link.plan.blocks(self.me.rank, link.peer.rank, offer.request)
        failure = self.admission.offer_refusal(link, room, offer, owed)
        if failure:
            if room is not None:
                self.admission.record_late_target(room, link)
            self.outbounds.drained(link, offer, failure)
            return
        room = self.admission.room_for(offer, self.outbox.now)
        transfer = TransferRequest(
            offer.room,
            link.session,
            offer.generation,
            self.me.rank,
            link.peer,
            link.plan,
            offer.request,
            offer.tables,
            offer.proof,
        )
        outbound = OutboundTransfer(room, link, transfer, owed, self.outbox.now)
        room.outbounds[link.peer.rank] = outbound
        room.record_target(link)
        self.peers.send(link, Accept(offer.room, offer.generation))
        if room.name in self.asks.rooms:
            # The others may have waited with their Close for this Offer.
            for one in room.outbounds.values():
                self.writes.wake(one)
        for push in room.pushes:
            self.writes.push(outbound, push)
        if room.finish:
            self.writes.push_rest(outbound, room.finish)
            self._fail_unless_pushed(room)
            self.proofs.begin(outbound)

    def _fail_unless_pushed(self, room: SourceRoom) -> None:
        problem = room.push_problem()
        if problem:
            self._fail(room, problem)

    def _on_complete(self, link: Link, body: Complete) -> None:
        outbound = self.outbounds.find(link, body)
        if outbound is None or outbound.state is not OutboundState.CLOSED:
            return
        room = outbound.room
        del room.outbounds[link.peer.rank]
        room.served.add(link.peer.rank)
        assert room.plan is not None
        if room.served.issuperset(room.plan.audience(self.me.rank)):
            del self.rooms[room.name]
            self.asks.forget(room.name)
            self.outbox.do(Report(room.name, Done()))
            self.outbox.do(Release(room.name))

    def _on_abort(self, link: Link, body: Abort) -> None:
        outbound, room = self.outbounds.find(link, body), self.rooms.get(body.room)
        if outbound is not None:
            self._fail(outbound.room, body.failure)
            return
        if room is not None and room.expects(link.peer):
            # The target's offer was lost or never sent, so the room can't complete.
            self._fail(room, body.failure)
            self.admission.record_late_target(room, link)
        elif room is None and not body.accepted:
            self.admission.warn(link, body, self.outbox.now)
        self.outbounds.drained(link, body, body.failure)

    def _on_write_ended(self, event: WriteEnded) -> None:
        if event.fate is WriteFate.UNKNOWN:
            # It may continue. Only the end of the connection proves that it does not.
            doubted = self.inflight.writes.get(event.op)
            if doubted:
                text = f"the fate of a write to {doubted.outbound.peer} is unknown"
                self._fail(doubted.outbound.room, Failure.of(FailureCode.TRANSPORT, text))
                self.peers.lose(doubted.outbound.link, FailureCode.TRANSPORT, text)
            return
        write = self.writes.end(event.op)
        if write is None:
            return
        if event.fate is None:
            write.record()
        elif event.fate is WriteFate.BUSY:
            self.writes.retry(write)
        else:
            text = f"a write to {write.outbound.peer} failed"
            self._fail(write.outbound.room, Failure.of(FailureCode.TRANSPORT, text))
        self._drain(write.outbound.room)

    def _on_proven(self, event: Proven) -> None:
        outbound = self.proofs.end(event)
        if outbound is not None:
            self.writes.wake(outbound)
            self._drain(outbound.room)

    def _settle(self) -> None:
        """Start writes, and close the transfers whose writes and proofs have all ended."""
        for outbound in self.writes.settle():
            room, sending = outbound.room, outbound.state is OutboundState.SENDING
            ended = self.writes.is_sent(outbound) and not self.proofs.reads(outbound)
            closes = room.finish and sending and not room.failure and ended
            if closes and not self.asks.awaits_targets(room):
                self.outbounds.close(outbound)

    def _fail(self, room: SourceRoom, failure: Failure) -> None:
        """Report the failure, tell every target and stop. Writes in flight end on their own."""
        if room.failure is not None:
            return
        room.failure = failure
        if room.known_to_engine:
            self.outbox.do(Report(room.name, failure))
        room.state = advance(SOURCE_ROOM, room.state, SourceRoomStep.FAIL)
        if room.state is RoomState.WARNED:
            self.admission.limit_warned(room)
        for outbound in room.outbounds.values():
            outbound.state = advance(OUTBOUND, outbound.state, OutboundStep.FAIL)
            self.writes.drop(outbound)
            if outbound.inflight and outbound.link.state is LinkState.UP:
                self.peers.send(outbound.link, Abort(room.name, outbound.generation, failure))
        self._drain(room)

    def _drain(self, room: SourceRoom) -> None:
        """Remove transfers whose writes have ended, and the room after its last transfer."""
        if room.failure is None:
            return
        for rank, outbound in list(room.outbounds.items()):
            if not (self.writes.reads(outbound) or self.proofs.reads(outbound)):
                del room.outbounds[rank]
                attempt = RoomMessage(room.name, outbound.generation)
                self.outbounds.drained(outbound.link, attempt, room.failure)
                self.peers.drop_if_unneeded(outbound.link)
        ended = room.state is RoomState.FAILING and not room.outbounds
        if ended and self.rooms.get(room.name) is room:
            self.asks.forget(room.name)
            self.outbox.do(Release(room.name))
            self.admission.retire(room, self.outbox.now)

    def link_lost(self, link: Link, failure: Failure) -> None:
        """Fail the rooms of a lost target."""
        for outbound in self.outbounds.of(link):
            self._fail(outbound.room, failure)
        for name in self.asks.asked_on(link):
            room = self.rooms.get(name)
            if room is not None and room.known_to_engine and room.expects(link.peer):
                self._fail(room, failure)

    def link_gone(self, link: Link) -> None:
        """End the writes of a session that provably has none in flight any more."""
        for op, write in list(self.inflight.writes.items()):
            if write.outbound.link is link:
                self.writes.end(op)
                self._drain(write.outbound.room)

    def link_needed(self, link: Link) -> bool:
        """Whether a transfer of this link has not ended."""
        return any(True for _ in self.outbounds.of(link))

    def _on_tick(self) -> None:
        now = self.outbox.now
        for name in self.asks.expired():
            asked = self.rooms.get(name)
            if asked and asked.expects_targets(self.me.rank):
                self._fail(asked, asked.expired())
        for room in list(self.rooms.values()):
            if now >= room.deadline and room.state is not RoomState.FAILING:
                early = not room.known_to_engine
                self._fail(room, room.expired())
                if early:
                    self.rooms.pop(room.name, None)
            for outbound in room.outbounds.values():
                if now < outbound.repeat_at(self.config):
                    continue
                if outbound.state is OutboundState.CLOSED:
                    self.outbounds.close(outbound)
                else:
                    self.writes.repeat(outbound)

    def _timers(self) -> Iterable[float]:
        for asked in self.asks.rooms.values():
            yield asked.deadline
        for room in self.rooms.values():
            if room.state is not RoomState.FAILING:
                yield room.deadline
            for outbound in room.outbounds.values():
                yield outbound.repeat_at(self.config)

    def check(self) -> None:
        """Check the invariants of every part."""
        self.peers.check()
        self.admission.check()
        self.asks.check()
        self.outbounds.check()
        self.writes.check()
        self.proofs.check()
