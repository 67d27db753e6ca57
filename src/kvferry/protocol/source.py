"""The source machine: writes what it owes, and lets go of pages when that is proven.

A push becomes blocks for every target that has made an offer. Blocks that are
to be staged wait for a credit; if none comes in time they are written
directly, because staging is only ever an optimisation. Close is sent when the
engine has finished and every write has ended. A room that fails stops at once;
its pages are released when the last write that reads them has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvferry.config import ProtocolConfig
from kvferry.digest import MAX_DIGEST
from kvferry.errors import Misuse
from kvferry.ids import Room
from kvferry.plan.plan import Block
from kvferry.protocol.admission import Admission
from kvferry.protocol.cutting import merge
from kvferry.protocol.endpoint import Identity, Link
from kvferry.protocol.events import (
    Cancel,
    Chosen,
    Event,
    Finish,
    Open,
    Prepare,
    Push,
    Release,
    Report,
    TransferRequest,
)
from kvferry.protocol.lanes import Lane, SourceRoom
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    MAX_METADATA,
    Abort,
    Accept,
    Arrived,
    Body,
    Close,
    Complete,
    Drained,
    Grant,
    Nudge,
    Offer,
    RoomMessage,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode, Status
from kvferry.protocol.states import (
    LANE,
    SOURCE_ROOM,
    LaneState,
    LaneStep,
    LinkState,
    RoomState,
    RoomStep,
    advance,
)
from kvferry.protocol.writes import Writer


class SourceMachine(Writer):
    """Every room of one source rank."""

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        super().__init__(identity, config)
        self.rooms: dict[Room, SourceRoom] = {}
        self._admission = Admission(self.rooms, config)
        self._warned: deque[SourceRoom] = deque()

    def _take(self, event: Event) -> None:
        match event:
            case Push():
                self._on_push(event)
            case Chosen():
                self._on_chosen(event)
            case Open():
                self._on_open(event)
            case Finish():
                self._on_finish(event)
            case Prepare():
                self._on_prepare(event)
            case Cancel():
                self._on_cancel(event)
            case _:
                super()._take(event)

    def _take_message(self, link: Link, body: Body) -> None:
        match body:
            case Offer():
                self._on_offer(link, body)
            case Grant():
                self._on_grant(link, body)
            case Complete():
                self._on_complete(link, body)
            case Nudge():
                self._on_nudge(link, body)
            case Abort():
                self._on_abort(link, body)
            case _:
                super()._take_message(link, body)

    # ------------------------------------------------------------ what a caller sees

    def status(self, name: Room) -> Status | None:
        """Where a room stands; None if it has ended or the engine never opened it."""
        room = self.rooms.get(name)
        if room is None or not room.known_to_engine:
            return None
        if room.failure:
            return Status.FAILED
        if not room.lanes and not room.served:
            return Status.CONNECTING
        return Status.MOVING if room.pushes else Status.WAITING

    @property
    def num_quarantined(self) -> int:
        """Failed rooms whose pages wait for a write to a lost peer to end."""
        if not self._any_lost:
            return 0
        return sum(room.is_quarantined for room in self.rooms.values())

    # ------------------------------------------------------------ from the engine

    def _on_open(self, event: Open) -> None:
        room = self.rooms.get(event.room)
        if room and room.known_to_engine:
            raise Misuse(f"room {event.room!r} is open already; use another id")
        failure = self._admission.of_room(event, self._now, self.num_quarantined)
        if room is None or room.state is RoomState.OVER:
            room = SourceRoom(event.room, RoomState.OPEN, event.deadline)
            self.rooms[event.room] = room
        else:
            room.state = advance(SOURCE_ROOM, room.state, RoomStep.OPEN)
            room.deadline = event.deadline
        if room.state is RoomState.FAILING:
            assert room.failure is not None
            self._do(Report(room.name, room.failure))
            self._drain(room)
        elif failure:
            self._fail(room, failure)

    def _running(self, name: Room, what: str) -> SourceRoom | None:
        """The room that the engine is still pushing to; None if it has failed meanwhile."""
        room = self.rooms.get(name)
        if room is None or room.failure or not room.known_to_engine:
            # The engine will hear of it; its call has crossed our report.
            self.counts["late"] += 1
            return None
        if room.state is not RoomState.OPEN:
            raise Misuse(f"room {name!r} is {room.state}; it can't {what}")
        return room

    def _on_prepare(self, event: Prepare) -> None:
        room = self._running(event.room, "prepare")
        for lane in room.lanes.values() if room else ():
            self._expect(lane, event)

    def _on_push(self, event: Push) -> None:
        room = self._running(event.room, "push")
        if room is None:
            return
        layers = self._layers_of(event)
        if room.pushed.overlaps(layers, event.tokens):
            which = f"the tokens {event.tokens} of layers {layers}"
            raise Misuse(f"room {event.room!r} has had some of {which} pushed")
        if event.states and room.rows.overlaps(layers):
            raise Misuse(f"room {event.room!r} has had state rows of the layers {layers} pushed")
        room.pushes.append(event)
        room.pushed.add(layers, event.tokens)
        if event.states:
            room.rows.add(layers)
        for lane in room.lanes.values():
            self._send(lane, event)

    def _on_finish(self, event: Finish) -> None:
        if len(event.metadata) > MAX_METADATA:
            raise Misuse(f"metadata has at most {MAX_METADATA} bytes, not {len(event.metadata)}")
        if len(event.digest) > MAX_DIGEST:
            raise Misuse(f"a digest has at most {MAX_DIGEST} bytes, not {len(event.digest)}")
        room = self._running(event.room, "finish")
        if room is None:
            return
        room.state = advance(SOURCE_ROOM, room.state, RoomStep.FINISH)
        room.finish = event
        for lane in list(room.lanes.values()):
            self._send_rest(lane, event)
        self._demand_all_pushed(room)

    def _on_cancel(self, event: Cancel) -> None:
        room = self.rooms.get(event.room)
        if room and room.known_to_engine:
            given_up = Failure.of(FailureCode.ABORTED, "given up at prefill")
            self._fail(room, event.failure or given_up)

    def _demand_all_pushed(self, room: SourceRoom) -> None:
        """A lane that could never close must fail now and not at its deadline."""
        for lane in room.lanes.values() if room.finish else ():
            block = room.lacks(lane)
            if block is not None:
                text = f"{block!r} was never pushed; pushed were {room.pushed!r}"
                self._fail(room, Failure.of(FailureCode.NOT_ALL_PUSHED, text))
                return

    # ------------------------------------------------------------ offers

    def _on_offer(self, link: Link, offer: Offer) -> None:
        room = self.rooms.get(offer.room)
        lane = room.lanes.get(link.peer.rank) if room else None
        if lane and lane.link is link and lane.generation == offer.generation:
            self._say(link, Accept(offer.room, offer.generation))
            return
        owed = link.plan.blocks(self.me.rank, link.peer.rank, offer.request)
        failure = self._admission.of_offer(link, room, offer, owed)
        if failure:
            if room is not None:
                self._hear_after_end(room, link)
            self._say_drained(link, offer, failure)
            return
        room = self._room_for(offer, room)
        self._add_lane(room, link, offer, owed)

    def _room_for(self, offer: Offer, room: SourceRoom | None) -> SourceRoom:
        if room is None:
            deadline = self._now + min(offer.remaining_s, self.config.early_s)
            room = SourceRoom(offer.room, RoomState.EARLY, deadline)
            self.rooms[offer.room] = room
        else:
            room.state = advance(SOURCE_ROOM, room.state, RoomStep.OFFER)
        if room.state is RoomState.EARLY and room.failure:
            # Taken back before, and offered again: another attempt, from the start.
            room.failure, room.plan, room.instance = None, None, None
            room.heard.clear()
        return room

    def _add_lane(
        self, room: SourceRoom, link: Link, offer: Offer, owed: tuple[Block, ...]
    ) -> None:
        transfer = TransferRequest(
            offer.room,
            link.session,
            offer.generation,
            self.me.rank,
            link.peer,
            link.plan,
            offer.request,
            offer.tables,
        )
        lane = Lane(room, link, transfer, owed, self._now)
        room.lanes[link.peer.rank] = lane
        room.hear(link)
        self._say(link, Accept(offer.room, offer.generation))
        for push in room.pushes:
            self._send(lane, push)
        if room.finish:
            self._send_rest(lane, room.finish)
            self._demand_all_pushed(room)

    # ------------------------------------------------------------ closing

    def _close_if_sent(self, lane: Lane) -> None:
        room = lane.room
        if room.finish and lane.idle and lane.state is LaneState.SENDING and not room.failure:
            lane.state = advance(LANE, lane.state, LaneStep.CLOSE)
            self._say_close(lane)

    def _say_close(self, lane: Lane) -> None:
        finish = lane.room.finish
        assert finish is not None
        written = merge(lane.link.plan.spec, lane.written)
        named, rest = written[:MAX_BLOCKS], written[MAX_BLOCKS:]
        for at in range(0, len(rest), MAX_BLOCKS):
            some = rest[at : at + MAX_BLOCKS]
            self._note(lane.link, Arrived(lane.room.name, lane.generation, some))
        metadata = finish.metadata if self.me.rank == self.layout.lead else None
        lane.said_at = self._now
        about = lane.room.name, lane.generation, finish.num_tokens
        self._say(lane.link, Close(*about, named, metadata, finish.digest))

    def _lane(self, link: Link, body: RoomMessage) -> Lane | None:
        room = self.rooms.get(body.room)
        lane = room.lanes.get(link.peer.rank) if room else None
        if lane is None or lane.link is not link or lane.generation != body.generation:
            return None
        return lane

    def _on_grant(self, link: Link, body: Grant) -> None:
        lane = self._lane(link, body)
        if lane is None:
            return
        for credit in body.credits:
            if credit.serial not in lane.used:
                lane.credit[credit.serial] = credit.slot
        self._wake(lane)

    def _on_nudge(self, link: Link, body: Nudge) -> None:
        lane = self._lane(link, body)
        if lane is None:
            text = f"room {body.room!r} is not known here"
            failure = Failure.of(FailureCode.UNKNOWN_ROOM, text)
            self._say_drained(link, body, failure)
            return
        for serial in body.serials:
            if serial in lane.notes:
                self._note(link, lane.notes[serial])
        if lane.state is LaneState.CLOSED:
            self._say_close(lane)

    def _on_complete(self, link: Link, body: Complete) -> None:
        lane = self._lane(link, body)
        if lane is None or lane.state is not LaneState.CLOSED:
            return
        room = lane.room
        del room.lanes[link.peer.rank]
        room.served.add(link.peer.rank)
        assert room.plan is not None
        if room.served.issuperset(room.plan.audience(self.me.rank)):
            del self.rooms[room.name]
            self._do(Report(room.name, Done()))
            self._do(Release(room.name))

    # ------------------------------------------------------------ failing

    def _on_abort(self, link: Link, body: Abort) -> None:
        lane = self._lane(link, body)
        room = self.rooms.get(body.room)
        if lane is not None:
            self._fail(lane.room, body.failure)
            return
        if room is not None and room.awaits(link.peer):
            # Its offer was lost, or it made none, so the room can never be served.
            self._fail(room, body.failure)
            self._hear_after_end(room, link)
        elif room is None and not body.accepted:
            self._warn(link, body)
        self._say_drained(link, body, body.failure)

    def _hear_after_end(self, room: SourceRoom, link: Link) -> None:
        """Count a target that speaks of a failed room; forget the room after the last of them."""
        if room.failure is not None and room.awaits(link.peer):
            room.hear(link)
            if room.state is RoomState.OVER and not room.awaits_offers(self.me.rank):
                del self.rooms[room.name]

    def _say_drained(self, link: Link, body: RoomMessage, failure: Failure) -> None:
        link.remember_drained(body.room, body.generation, self._now)
        self._say(link, Drained(body.room, body.generation, failure, link.seq_in))

    def _warn(self, link: Link, body: Abort) -> None:
        """Remember for a while that the room was given up before it was opened here."""
        if (body.room, body.generation) in link.drained:
            # Said again before our answer came: the room has been here, and is over.
            return
        deadline = self._now + self.config.early_s
        room = SourceRoom(body.room, RoomState.WARNED, deadline, failure=body.failure)
        room.hear(link)
        self.rooms[body.room] = room
        self._bound_warned(room)

    def _bound_warned(self, room: SourceRoom) -> None:
        """Of too many rooms that were given up early, forget the oldest: they have a deadline."""
        self._warned.append(room)
        while len(self._warned) > self.config.max_early_rooms:
            oldest = self._warned.popleft()
            if oldest.state is RoomState.WARNED and self.rooms.get(oldest.name) is oldest:
                del self.rooms[oldest.name]

    def _fail(self, room: SourceRoom, failure: Failure) -> None:
        """Report, tell every target, and stop; writes in flight end on their own."""
        if room.failure is not None:
            return
        room.failure = failure
        if room.known_to_engine:
            self._do(Report(room.name, failure))
        room.state = advance(SOURCE_ROOM, room.state, RoomStep.FAIL)
        if room.state is RoomState.WARNED:
            self._bound_warned(room)
        for lane in room.lanes.values():
            lane.state = advance(LANE, lane.state, LaneStep.FAIL)
            self._drop_questions(lane)
            lane.drop_pending()
            self._discard_held(lane)
            if lane.inflight and lane.link.state is LinkState.UP:
                self._say(lane.link, Abort(room.name, lane.generation, failure))
        self._drain(room)

    def _drain(self, room: SourceRoom) -> None:
        """Let go of lanes whose writes have ended, and of the room after its last lane."""
        if room.failure is None:
            return
        for rank, lane in list(room.lanes.items()):
            if not lane.inflight:
                del room.lanes[rank]
                gone = RoomMessage(room.name, lane.generation)
                self._say_drained(lane.link, gone, room.failure)
                self._drop_if_unneeded(lane.link)
        ended = room.state is RoomState.FAILING and not room.lanes
        if ended and self.rooms.get(room.name) is room:
            self._do(Release(room.name))
            self._bury(room)

    def _bury(self, room: SourceRoom) -> None:
        """Forget a failed room, but not before late offers for it can be refused."""
        few = self._admission.count(RoomState.OVER) < self.config.max_early_rooms
        if few and room.awaits_offers(self.me.rank):
            room.state = advance(SOURCE_ROOM, room.state, RoomStep.DRAIN)
            room.deadline = self._now + self.config.early_s
        else:
            del self.rooms[room.name]

    def _lanes_of(self, link: Link) -> Iterator[Lane]:
        for room in list(self.rooms.values()):
            for lane in list(room.lanes.values()):
                if lane.link is link:
                    yield lane

    def _link_lost(self, link: Link, failure: Failure) -> None:
        for lane in self._lanes_of(link):
            self._fail(lane.room, failure)

    def _link_gone(self, link: Link) -> None:
        for op, write in list(self.writing.items()):
            if write.lane.link is link:
                self._end_write(op)
                self._drain(write.lane.room)

    def _link_needed(self, link: Link) -> bool:
        return any(True for _ in self._lanes_of(link))

    # ------------------------------------------------------------ time

    def _tick_rooms(self) -> None:
        for room in list(self.rooms.values()):
            if self._now >= room.deadline and room.state is not RoomState.FAILING:
                self._expire(room)
            for lane in room.lanes.values():
                if self._now >= lane.repeat_at(self.config):
                    self._repeat(lane)

    def _expire(self, room: SourceRoom) -> None:
        text = "no offer came" if not room.lanes and not room.served else "not everything was sent"
        early = not room.known_to_engine
        self._fail(room, Failure.of(FailureCode.DEADLINE, text))
        if early:
            self.rooms.pop(room.name, None)

    def _repeat(self, lane: Lane) -> None:
        """Say again what may have been lost, or stop waiting for credits."""
        if lane.state is LaneState.CLOSED:
            self._say_close(lane)
            return
        if lane.busy_until and self._now >= lane.busy_until:
            lane.busy_until = 0.0
            self._wake(lane)
        impatient = self._now >= lane.waiting_since + self.config.credit_patience_s
        if lane.awaits_credit and impatient:
            self.counts["impatient"] += len(lane.staged) + len(lane.held)
            lane.direct.extend(lane.staged)
            lane.staged.clear()
            self._discard_held(lane)
            self._wake(lane)
        elif lane.awaits_credit and self._now >= lane.said_at + self.config.resend_s:
            self._want(lane)

    def _room_timers(self) -> Iterable[float]:
        for room in self.rooms.values():
            if room.state is not RoomState.FAILING:
                yield room.deadline
            for lane in room.lanes.values():
                yield lane.repeat_at(self.config)
