"""Admission: which rooms a source or a target takes on.

A source also remembers rooms that are not open: an offer may come before its room is opened, an
abort before its offer, and an offer after its room has failed. What is remembered of such rooms
has limits and deadlines of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvferry.config import ProtocolConfig
from kvferry.errors import Refused
from kvferry.fingerprint import difference
from kvferry.ids import Peer, Room
from kvferry.plan.plan import Block
from kvferry.protocol.checks import offer_problem
from kvferry.protocol.events import Open, Receive
from kvferry.protocol.inbound import TargetRoom
from kvferry.protocol.links import Identity, Link, Plans
from kvferry.protocol.messages import Abort, Offer
from kvferry.protocol.outbound import SourceRoom
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import SOURCE_ROOM, LinkState, RoomState, RoomStep, advance


class SourceAdmission:
    """Failures that end what has not begun, and rooms that are early, given up or over."""

    def __init__(self, rank: int, rooms: dict[Room, SourceRoom], config: ProtocolConfig) -> None:
        self._rank = rank
        self._rooms = rooms
        self._config = config
        self._warned: deque[SourceRoom] = deque()

    def of_room(self, event: Open, now: float, num_quarantined: int) -> Failure | None:
        """Return why a room can't be opened."""
        num_rooms = len(self._rooms) - (event.room in self._rooms)
        return _of_any_room(event.deadline, now, num_rooms, num_quarantined, self._config)

    def of_offer(
        self, link: Link, room: SourceRoom | None, offer: Offer, owed: tuple[Block, ...]
    ) -> Failure | None:
        """Return why an offer can't be taken."""
        if link.state is LinkState.LOST:
            # Kept only until its last write has ended. A outbound on it would outlive it.
            text = f"the session with {link.peer} is over"
            return Failure.of(FailureCode.SESSION_REPLACED, text)
        if (offer.room, offer.generation) in link.drained:
            return Failure.of(FailureCode.ABORTED, "the room was let go of")
        assert link.hello is not None
        problem = offer_problem(link.plan, link.hello, link.peer.rank, offer, owed)
        if problem:
            return Failure.of(FailureCode.BAD_OFFER, problem)
        return self._of_early() if room is None else _of_known_room(room, link.peer)

    def _of_early(self) -> Failure | None:
        early = self._count(RoomState.EARLY)
        if early >= self._config.max_early_rooms:
            text = f"{early} offers wait for rooms that were not opened yet"
            return Failure.of(FailureCode.TOO_MANY_ROOMS, text)
        return None

    def _count(self, state: RoomState) -> int:
        """Rooms in that state, as far as it matters for a limit on them."""
        if len(self._rooms) < self._config.max_early_rooms:
            return 0
        return sum(room.state is state for room in self._rooms.values())

    # ------------------------------------------------------------ rooms that are not open

    def early_until(self, offer: Offer, now: float) -> float:
        """When an offer for a room that was not opened is forgotten."""
        return now + min(offer.remaining_s, self._config.unclaimed_offer_ttl_s)

    def room_for(self, offer: Offer, now: float) -> SourceRoom:
        """Return the room of an offer that was let in, opened or not."""
        room = self._rooms.get(offer.room)
        if room is None:
            room = SourceRoom(offer.room, RoomState.EARLY, self.early_until(offer, now))
            self._rooms[offer.room] = room
        else:
            room.state = advance(SOURCE_ROOM, room.state, RoomStep.OFFER)
        if room.state is RoomState.EARLY and room.failure:
            # Taken back before, and offered again: another attempt, from the start.
            room.failure, room.plan, room.instance = None, None, None
            room.heard.clear()
        return room

    def warn(self, link: Link, body: Abort, now: float) -> None:
        """Remember for a while that a room was given up before it was opened here."""
        if (body.room, body.generation) in link.drained:
            # Said again before our answer came: the room has been here, and is over.
            return
        deadline = now + self._config.unclaimed_offer_ttl_s
        room = SourceRoom(body.room, RoomState.WARNED, deadline, failure=body.failure)
        room.hear(link)
        self._rooms[body.room] = room
        self.bound_warned(room)

    def bound_warned(self, room: SourceRoom) -> None:
        """Of too many rooms that were given up early, forget the oldest: they have a deadline."""
        self._warned.append(room)
        while len(self._warned) > self._config.max_early_rooms:
            oldest = self._warned.popleft()
            if oldest.state is RoomState.WARNED and self._rooms.get(oldest.name) is oldest:
                del self._rooms[oldest.name]

    def confirm_dead(self, room: SourceRoom, now: float) -> None:
        """Forget a failed room, but not before late offers for it can be refused."""
        few = self._count(RoomState.OVER) < self._config.max_early_rooms
        if few and room.awaits_offers(self._rank):
            room.state = advance(SOURCE_ROOM, room.state, RoomStep.DRAIN)
            room.deadline = now + self._config.unclaimed_offer_ttl_s
        else:
            del self._rooms[room.name]

    def hear_after_end(self, room: SourceRoom, link: Link) -> None:
        """Count a target that speaks of a failed room; forget the room after the last of them."""
        if room.failure is not None and room.awaits(link.peer):
            room.hear(link)
            if room.state is RoomState.OVER and not room.awaits_offers(self._rank):
                del self._rooms[room.name]

    def check(self) -> None:
        """Every room is kept under its name, and what was given up early has its limit."""
        assert len(self._warned) <= self._config.max_early_rooms
        for name, room in self._rooms.items():
            assert room.name == name, room
            assert room.state is not RoomState.OVER or not room.outbounds, room


def _of_known_room(room: SourceRoom, peer: Peer) -> Failure | None:
    awaits = room.awaits(peer)
    if room.state in (RoomState.FAILING, RoomState.OVER) or (room.failure and awaits):
        # Another target of the same attempt gave it up.
        return room.failure
    if room.state is not RoomState.WARNED and not awaits:
        return Failure.of(FailureCode.ROOM_TAKEN, f"the room is being sent to {room.instance}")
    return None


class TargetAdmission:
    """Failures of rooms that can't even begin."""

    def __init__(
        self,
        rooms: Mapping[Room, TargetRoom],
        plans: Plans,
        identity: Identity,
        config: ProtocolConfig,
    ) -> None:
        self._rooms = rooms
        self._plans = plans
        self._fingerprint = identity.fingerprint
        self._config = config

    def of_room(self, event: Receive, now: float, num_quarantined: int) -> Failure | None:
        """Return why a room can't be received."""
        failure = _of_any_room(event.deadline, now, len(self._rooms), num_quarantined, self._config)
        if failure:
            return failure
        if event.prefill.fingerprint != self._fingerprint:
            text = difference(event.prefill.fingerprint, self._fingerprint)
            return Failure.of(FailureCode.REFUSED, text)
        try:
            self._plans.plan_with(event.prefill.layout)
        except Refused as refused:
            return Failure.of(FailureCode.REFUSED, str(refused))
        return None


def _of_any_room(
    deadline: float, now: float, num_rooms: int, num_quarantined: int, config: ProtocolConfig
) -> Failure | None:
    if deadline <= now:
        return Failure.of(FailureCode.DEADLINE, "the deadline had passed at the start")
    if num_rooms >= config.max_rooms:
        return Failure.of(FailureCode.TOO_MANY_ROOMS, f"{num_rooms} rooms are open here")
    if num_quarantined >= config.max_quarantined_rooms:
        text = f"{num_quarantined} failed rooms wait for proof from lost peers"
        return Failure.of(FailureCode.QUARANTINE_FULL, text)
    return None
