"""Admission: why a source can't take a room on, or an offer for one.

Looks at the table of rooms and at the limits on it, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer, Room
from kvferry.plan.plan import Block
from kvferry.protocol.checks import offer_problem
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import Open
from kvferry.protocol.lanes import SourceRoom
from kvferry.protocol.messages import Offer
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LinkState, RoomState


class Admission:
    """Failures that end what has not begun; None where it may begin."""

    def __init__(self, rooms: Mapping[Room, SourceRoom], config: ProtocolConfig) -> None:
        self._rooms = rooms
        self._config = config

    def of_room(self, event: Open, now: float, num_quarantined: int) -> Failure | None:
        """Why a room can't be opened."""
        if event.deadline <= now:
            return Failure.of(FailureCode.DEADLINE, "the deadline had passed at the start")
        if len(self._rooms) - (event.room in self._rooms) >= self._config.max_rooms:
            return Failure.of(FailureCode.TOO_MANY_ROOMS, f"{len(self._rooms)} rooms are open here")
        if num_quarantined >= self._config.max_quarantined_rooms:
            text = f"{num_quarantined} failed rooms wait for proof from lost peers"
            return Failure.of(FailureCode.QUARANTINE_FULL, text)
        return None

    def of_offer(
        self, link: Link, room: SourceRoom | None, offer: Offer, owed: tuple[Block, ...]
    ) -> Failure | None:
        """Why an offer can't be taken."""
        if link.state is LinkState.LOST:
            # Kept only until its last write has ended. A lane on it would outlive it.
            text = f"the session with {link.peer} is over"
            return Failure.of(FailureCode.SESSION_REPLACED, text)
        if (offer.room, offer.generation) in link.drained:
            return Failure.of(FailureCode.ABORTED, "the room was let go of")
        assert link.hello is not None
        problem = offer_problem(link.plan, link.hello, link.peer.rank, offer, owed)
        if problem:
            return Failure.of(FailureCode.BAD_OFFER, problem)
        return self.of_early() if room is None else _of_known_room(room, link.peer)

    def of_early(self) -> Failure | None:
        """Why an offer for a room that was not opened yet can't be kept."""
        early = self.count(RoomState.EARLY)
        if early >= self._config.max_early_rooms:
            text = f"{early} offers wait for rooms that were not opened yet"
            return Failure.of(FailureCode.TOO_MANY_ROOMS, text)
        return None

    def count(self, *states: RoomState) -> int:
        """Rooms in those states, as far as it matters for a limit on them."""
        if len(self._rooms) < self._config.max_early_rooms:
            return 0
        return sum(room.state in states for room in self._rooms.values())


def _of_known_room(room: SourceRoom, peer: Peer) -> Failure | None:
    awaits = room.awaits(peer)
    if room.state in (RoomState.FAILING, RoomState.OVER) or (room.failure and awaits):
        # Another target of the same attempt gave it up.
        return room.failure
    if room.state is not RoomState.WARNED and not awaits:
        return Failure.of(FailureCode.ROOM_TAKEN, f"the room is being sent to {room.instance}")
    return None
