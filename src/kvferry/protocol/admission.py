"""Admission of offers, and a source's memory of rooms that are not open.

Messages about a room may reach a source before its engine has opened the room, or after the room
has failed: an offer before the open, an abort before its offer, an offer after the failure. What
the source remembers of such rooms has its own limits and deadlines.
"""

from __future__ import annotations

from collections import deque

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer, Room
from kvferry.plan.plan import Block
from kvferry.protocol.checks import offer_problem
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Abort, Offer, RoomMessage
from kvferry.protocol.outbound import SourceRoom
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import SOURCE_ROOM, LinkState, RoomState, SourceRoomStep, advance


class SourceAdmission:
    """Admission of offers, and rooms in the states early, warned and over."""

    def __init__(self, rank: int, rooms: dict[Room, SourceRoom], config: ProtocolConfig) -> None:
        self._rank = rank
        self._rooms = rooms
        self._config = config
        self._warned: deque[SourceRoom] = deque()

    def offer_refusal(
        self, link: Link, room: SourceRoom | None, offer: Offer, owed: tuple[Block, ...]
    ) -> Failure | None:
        """Return why an offer can't be accepted."""
        ended = attempt_refusal(link, offer)
        if ended:
            return ended
        assert link.hello is not None
        problem = offer_problem(link.plan, link.hello, link.peer.rank, offer, owed)
        if problem:
            return Failure.of(FailureCode.BAD_OFFER, problem)
        if room is not None:
            return _known_room_refusal(room, link.peer)
        num_early = self._count(RoomState.EARLY)
        if num_early >= self._config.max_early_rooms:
            text = f"{num_early} offers wait for rooms that are not open yet"
            return Failure.of(FailureCode.TOO_MANY_ROOMS, text)
        return None

    def _count(self, state: RoomState) -> int:
        """Return the number of rooms in a state; 0 if no limit can be reached."""
        if len(self._rooms) < self._config.max_early_rooms:
            return 0
        return sum(room.state is state for room in self._rooms.values())

    def early_deadline(self, offer: Offer, now: float) -> float:
        """Return when to forget an offer for a room that is not open."""
        return now + min(offer.remaining_s, self._config.unclaimed_offer_ttl_s)

    def room_for(self, offer: Offer, now: float) -> SourceRoom:
        """Return the room of an accepted offer, open or not."""
        room = self._rooms.get(offer.room)
        if room is None:
            room = SourceRoom(offer.room, RoomState.EARLY, self.early_deadline(offer, now))
            self._rooms[offer.room] = room
        else:
            room.state = advance(SOURCE_ROOM, room.state, SourceRoomStep.OFFER)
        if room.state is RoomState.EARLY and room.failure:
            # Aborted and offered again: another attempt, from the start.
            room.failure, room.plan, room.instance = None, None, None
            room.known_targets.clear()
        return room

    def warn(self, link: Link, body: Abort, now: float) -> None:
        """Remember for a while that a room was aborted before it was opened here."""
        if (body.room, body.generation) in link.drained:
            # The target repeats the Abort of a room that has ended here.
            return
        deadline = now + self._config.unclaimed_offer_ttl_s
        room = SourceRoom(body.room, RoomState.WARNED, deadline, failure=body.failure)
        room.record_target(link)
        self._rooms[body.room] = room
        self.limit_warned(room)

    def limit_warned(self, room: SourceRoom) -> None:
        """Add a warned room. Beyond the limit, forget the oldest one before its deadline."""
        self._warned.append(room)
        while len(self._warned) > self._config.max_early_rooms:
            oldest = self._warned.popleft()
            if oldest.state is RoomState.WARNED and self._rooms.get(oldest.name) is oldest:
                del self._rooms[oldest.name]

    def retire(self, room: SourceRoom, now: float) -> None:
        """Forget a failed room, or keep it for a while to refuse late offers."""
        below_limit = self._count(RoomState.OVER) < self._config.max_early_rooms
        if below_limit and room.expects_targets(self._rank):
            room.state = advance(SOURCE_ROOM, room.state, SourceRoomStep.DRAIN)
            room.deadline = now + self._config.unclaimed_offer_ttl_s
        else:
            del self._rooms[room.name]

    def record_late_target(self, room: SourceRoom, link: Link) -> None:
        """Record a target's message about a failed room; forget the room after the last one."""
        if room.failure is not None and room.expects(link.peer):
            room.record_target(link)
            if room.state is RoomState.OVER and not room.expects_targets(self._rank):
                del self._rooms[room.name]

    def check(self) -> None:
        """Check the names of all rooms and the limit on warned ones."""
        assert len(self._warned) <= self._config.max_early_rooms
        for name, room in self._rooms.items():
            assert room.name == name, room
            assert room.state is not RoomState.OVER or not room.outbounds, room


def attempt_refusal(link: Link, attempt: RoomMessage) -> Failure | None:
    """Return why a target's attempt at a room can't begin any more."""
    if link.state is LinkState.LOST:
        # The link exists only until its last write has ended; a transfer would outlive it.
        text = f"the session with {link.peer} is over"
        return Failure.of(FailureCode.SESSION_REPLACED, text)
    if (attempt.room, attempt.generation) in link.drained:
        return Failure.of(FailureCode.ABORTED, "this attempt at the room has ended")
    return None


def _known_room_refusal(room: SourceRoom, peer: Peer) -> Failure | None:
    expected = room.expects(peer)
    if room.state in (RoomState.FAILING, RoomState.OVER) or (room.failure and expected):
        # Another target has aborted the same attempt.
        return room.failure
    if room.state is not RoomState.WARNED and not expected:
        return Failure.of(FailureCode.ROOM_TAKEN, f"the room is being sent to {room.instance}")
    return None
