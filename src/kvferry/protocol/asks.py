"""Pulls at the lead source: each asked room has one answer for all ranks that ask.

A target that pulls asks the lead source of an instance how much of a token sequence the instance
holds. The first Ask of a room makes the engine look it up. All targets of the room get the same
answer, which is kept for ``unclaimed_offer_ttl_s`` or until the room ends. A held prefix is pinned
by the room that the engine opens for it, so that pins end and are released as rooms do. If some
target has not sent its Offer when the answer expires, the room fails.

An answer is forgotten when it expires or when this process ends, and the next Ask gets another one.
The lead therefore sends no Close of an asked room before it has the Offer of every target: until
then no target is done with tokens. A target with another answer never sends that Offer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.config import ProtocolConfig
from kvferry.ids import Generation, Room
from kvferry.protocol.admission import attempt_refusal
from kvferry.protocol.events import Held, LookUp, Outbox
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import Ask, Holding
from kvferry.protocol.outbound import SourceRoom
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LinkState


@dataclass(slots=True, eq=False)
class AskedRoom:
    """A room that targets of one instance have asked for. ``held`` is None until answered.

    ``deadline`` is when the answer expires.
    """

    instance: str
    deadline: float
    askers: dict[Link, Generation] = field(default_factory=dict)
    held: int | None = None


class Asks:
    """The asked rooms of a lead source."""

    def __init__(self, links: Links, outbox: Outbox, config: ProtocolConfig) -> None:
        self._links = links
        self._outbox = outbox
        self._config = config
        self.rooms: dict[Room, AskedRoom] = {}

    def refusal(self, link: Link, room: SourceRoom | None, ask: Ask) -> Failure | None:
        """Return why an Ask gets no answer."""
        failure = attempt_refusal(link, ask) or (room.failure if room else None)
        if failure:
            return failure
        asked = self.rooms.get(ask.room)
        is_open = room is not None and room.known_to_engine
        if asked.instance != link.peer.instance if asked else is_open:
            return Failure.of(FailureCode.ROOM_TAKEN, "another request has the room")
        if asked is None and len(self.rooms) >= self._config.max_asked_rooms:
            text = f"{len(self.rooms)} rooms are asked for here"
            return Failure.of(FailureCode.TOO_MANY_ROOMS, text)
        return None

    def ask(self, link: Link, ask: Ask) -> None:
        """Answer an Ask, or let the engine look up what it holds."""
        asked = self.rooms.get(ask.room)
        if asked is None:
            now, patience_s = self._outbox.now, self._config.unclaimed_offer_ttl_s
            deadline = now + ask.remaining_s
            asked = AskedRoom(link.peer.instance, min(deadline, now + patience_s))
            self.rooms[ask.room] = asked
            self._outbox.do(LookUp(ask.room, link.peer, ask.chain, ask.prefix, deadline))
        asked.askers[link] = ask.generation
        self._answer(ask.room, asked, link)

    def held(self, event: Held) -> None:
        """Give the engine's answer to the targets that wait for it. The first answer counts."""
        asked = self.rooms.get(event.room)
        if asked is None or asked.held is not None:
            self._outbox.counts["late"] += 1
            if asked is None and len(self.rooms) < self._config.max_asked_rooms:
                # Nobody waits any more. The room that the engine opens for it fails soon.
                expires = self._outbox.now + self._config.resend_s
                self.rooms[event.room] = AskedRoom("", expires, held=event.num_tokens)
            return
        asked.held = event.num_tokens
        for link in asked.askers:
            self._answer(event.room, asked, link)

    def _answer(self, room: Room, asked: AskedRoom, link: Link) -> None:
        if asked.held is not None and link.state is LinkState.UP:
            self._links.send(link, Holding(room, asked.askers[link], asked.held))

    def awaits_targets(self, room: SourceRoom) -> bool:
        """Whether some target of an asked room may lack the answer, so that none may be done."""
        return room.name in self.rooms and room.expects_targets(self._links.identity.peer.rank)

    def asked_on(self, link: Link) -> list[Room]:
        """Return the rooms that were asked for on a link."""
        return [name for name, asked in self.rooms.items() if link in asked.askers]

    def forget(self, room: Room) -> None:
        """Drop the answer of a room that has ended."""
        self.rooms.pop(room, None)

    def expired(self) -> list[Room]:
        """Drop the answers whose time is over, and return their rooms."""
        now = self._outbox.now
        names = [name for name, asked in self.rooms.items() if now >= asked.deadline]
        for name in names:
            del self.rooms[name]
        return names

    def check(self) -> None:
        """Check the limit."""
        assert len(self.rooms) <= self._config.max_asked_rooms
