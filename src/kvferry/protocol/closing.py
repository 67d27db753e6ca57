"""What a source says about its lanes: that all is written, or that nothing more will be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvferry.ids import Room
from kvferry.protocol.cutting import merge
from kvferry.protocol.lanes import Lane, SourceRoom
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    Arrived,
    Close,
    Drained,
    Nudge,
    RoomMessage,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LANE, LaneState, LaneStep, advance


class Lanes:
    """Every lane of every room, and its last words."""

    def __init__(self, rooms: Mapping[Room, SourceRoom], links: Links, outbox: Outbox) -> None:
        self._rooms = rooms
        self._links = links
        self._outbox = outbox

    def find(self, link: Link, body: RoomMessage) -> Lane | None:
        """Return the lane that a message is about, if that attempt at the room is still on."""
        room = self._rooms.get(body.room)
        lane = room.lanes.get(link.peer.rank) if room else None
        if lane is None or lane.link is not link or lane.generation != body.generation:
            return None
        return lane

    def of(self, link: Link) -> Iterator[Lane]:
        """Yield the lanes that a link carries."""
        for room in list(self._rooms.values()):
            for lane in list(room.lanes.values()):
                if lane.link is link:
                    yield lane

    def close(self, lane: Lane) -> None:
        """Everything is written: say so, now and until the target answers."""
        lane.state = advance(LANE, lane.state, LaneStep.CLOSE)
        self.repeat_close(lane)

    def repeat_close(self, lane: Lane) -> None:
        """Say that a lane is closed, with everything that no note has told."""
        finish, me = lane.room.finish, self._links.identity
        assert finish is not None
        written = merge(lane.transfer.plan.spec, lane.written)
        named, rest = written[:MAX_BLOCKS], written[MAX_BLOCKS:]
        for at in range(0, len(rest), MAX_BLOCKS):
            some = Arrived(lane.room.name, lane.generation, rest[at : at + MAX_BLOCKS])
            self._links.note(lane.peer, lane.link.session, some)
        metadata = finish.metadata if me.peer.rank == me.layout.lead else None
        lane.said_at = self._outbox.now
        about = lane.room.name, lane.generation, finish.num_tokens
        self._links.say(lane.link, Close(*about, named, metadata, finish.digest))

    def nudged(self, link: Link, body: Nudge) -> None:
        """A target asks how far a lane is: repeat what it may have missed."""
        lane = self.find(link, body)
        if lane is None:
            text = f"room {body.room!r} is not known here"
            self.drained(link, body, Failure.of(FailureCode.UNKNOWN_ROOM, text))
            return
        for serial in body.serials:
            if serial in lane.notes:
                self._links.note(link.peer, link.session, lane.notes[serial])
        if lane.state is LaneState.CLOSED:
            self.repeat_close(lane)

    def drained(self, link: Link, about: RoomMessage, failure: Failure) -> None:
        """Say that nothing is written for an attempt at a room any more."""
        link.remember_drained(about.room, about.generation, self._outbox.now)
        self._links.say(link, Drained(about.room, about.generation, failure, link.seq_in))

    def check(self) -> None:
        """Every lane is of its room and of its target's rank, and a closed one has ended."""
        for room in self._rooms.values():
            for rank, lane in room.lanes.items():
                assert lane.room is room, lane
                assert lane.peer.rank == rank, lane
                assert lane.state is not LaneState.CLOSED or lane.idle, lane
