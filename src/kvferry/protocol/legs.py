"""A target's rooms and legs: what each room expects from each of its sources.

A leg is one source's part in one room. ``Legs`` says what the target has to say about it, and
says it again until it is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from kvferry.ids import Generation, Op, Room, Serial, SlotIndex
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.cutting import image_bytes
from kvferry.protocol.events import Instance, ReceiveRequest, Scatter
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import (
    MAX_CREDITS,
    MAX_REMAINING_S,
    MIN_REMAINING_S,
    Abort,
    Arrived,
    Complete,
    Nudge,
    Offer,
    RoomMessage,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import LEG, LegState, LegStep, LinkState, advance


@dataclass(slots=True, eq=False)
class Leg:
    """What a room expects from one source."""

    source: int
    link: Link
    said_at: float
    state: LegState = LegState.CONNECTING
    offer_seq: int = 0
    accepted: bool = False
    vouched: bool = False  # it has said what it computed, and that is what was asked for

    def step(self, step: LegStep) -> None:
        """Go on to the next state."""
        self.state = advance(LEG, self.state, step)

    def answered(self) -> None:
        """The source has said something about the room."""
        if self.state is not LegState.QUIET:
            self.step(LegStep.ACCEPTED)


@dataclass(slots=True, eq=False)
class TargetRoom:
    """One room of one target rank."""

    name: Room
    wanted: ReceiveRequest
    generation: Generation
    prefill: Instance
    plan: Plan
    deadline: float
    ledger: Ledger
    legs: dict[int, Leg] = field(default_factory=dict)
    scatters: set[Op] = field(default_factory=set)
    metadata: bytes = b""
    failure: Failure | None = None

    @property
    def status(self) -> Status:
        """Where it stands."""
        if self.failure:
            return Status.FAILED
        if any(leg.state is LegState.CONNECTING for leg in self.legs.values()):
            return Status.CONNECTING
        return Status.MOVING if self.ledger.begun else Status.WAITING

    @property
    def is_quarantined(self) -> bool:
        """Whether it has failed and waits for proof from a lost source."""
        return self.failure is not None and any(
            leg.state is LegState.DRAINING and leg.link.state is LinkState.LOST
            for leg in self.legs.values()
        )

    def may_come(self, leg: Leg, note: Arrived, rank: int, slot_bytes: int) -> bool:
        """Whether a source owes what it says has come, and a slot holds it."""
        if not all(self.ledger.owes(leg.source, block) for block in note.blocks):
            return False
        if note.serial is None:
            return True
        size = image_bytes(self.plan, leg.source, rank, self.wanted.request, note.blocks)
        return size <= slot_bytes

    def expired(self) -> Failure:
        """Why it ends at its deadline."""
        late = [
            f"{leg.link.peer} ({leg.state})"
            for leg in self.legs.values()
            if leg.state is not LegState.CLOSED or self.ledger.missing(leg.source)
        ]
        return Failure.of(FailureCode.DEADLINE, f"still waiting for {', '.join(late)}")

    def unusable(self) -> list[Block]:
        """After a failure: what never came, and what came from a source that may be wrong.

        Where the engine gave a digest, what a source wrote counts only once it has vouched.
        """
        differs = self.failure is not None and self.failure.code is FailureCode.CONTENT_DIFFERS
        vouches = bool(self.wanted.digest)
        return self.ledger.lacking(
            {n for n, leg in self.legs.items() if differs or (vouches and not leg.vouched)}
        )


class Legs:
    """Every leg of every room, and what is said about it."""

    def __init__(self, rooms: Mapping[Room, TargetRoom], links: Links, outbox: Outbox) -> None:
        self._rooms = rooms
        self._links = links
        self._outbox = outbox

    def find(self, link: Link, body: RoomMessage) -> tuple[TargetRoom, Leg] | None:
        """Return the leg that a message is about, if this attempt at the room is still on."""
        room = self._rooms.get(body.room)
        if room is None or room.generation != body.generation:
            self._outbox.counts["late"] += 1
            return None
        leg = room.legs.get(link.peer.rank)
        if leg is None or leg.link is not link:
            return None
        leg.accepted = True
        return room, leg

    def of(self, link: Link) -> Iterator[tuple[TargetRoom, Leg]]:
        """Yield the legs that depend on a link, with their rooms."""
        for room in list(self._rooms.values()):
            for leg in room.legs.values():
                if leg.link is link:
                    yield room, leg

    def offer(self, room: TargetRoom, leg: Leg) -> None:
        """Tell a source which pages wait for what it owes."""
        if leg.state is LegState.CONNECTING:
            leg.step(LegStep.LINKED)
        left_s = room.deadline - self._outbox.now
        remaining_s = min(max(MIN_REMAINING_S, left_s), MAX_REMAINING_S)
        what = room.wanted.request, room.wanted.tables
        self._tell(leg, Offer(room.name, room.generation, *what, remaining_s))
        leg.offer_seq = leg.link.seq_out

    def complete(self, room: TargetRoom, leg: Leg) -> None:
        """Tell a source that the room is done."""
        self._tell(leg, Complete(room.name, room.generation))

    def abort(self, room: TargetRoom, leg: Leg) -> None:
        """Tell a source that the room has failed."""
        assert room.failure is not None
        self._tell(leg, Abort(room.name, room.generation, room.failure, leg.accepted))

    def _tell(self, leg: Leg, body: Offer | Nudge | Complete | Abort) -> None:
        leg.said_at = self._outbox.now
        self._links.say(leg.link, body)

    def repeat_at(self, leg: Leg) -> float:
        """When something has to be said again."""
        config = self._links.config
        match leg.state:
            case LegState.OFFERED | LegState.DRAINING:
                return leg.said_at + config.resend_s
            case LegState.ACCEPTED | LegState.CLOSED:
                return leg.said_at + config.nudge_s
            case LegState.CONNECTING | LegState.QUIET:
                return inf

    def repeat(self, room: TargetRoom, leg: Leg, serials: tuple[Serial, ...]) -> None:
        """Say again what may have been lost. ``serials`` are credits not seen used."""
        if leg.state is LegState.OFFERED:
            self.offer(room, leg)
        elif leg.state is LegState.DRAINING:
            self.abort(room, leg)
        else:
            self._tell(leg, Nudge(room.name, room.generation, serials[:MAX_CREDITS]))

    def is_quiet(self, room: TargetRoom) -> bool:
        """Whether it is proven that no source writes for the room any more."""
        return all(leg.state is LegState.QUIET for leg in room.legs.values())

    def check(self) -> None:
        """Every leg is of its source's link, and only a failed room drains."""
        for name, room in self._rooms.items():
            assert room.name == name, room
            for source, leg in room.legs.items():
                assert leg.source == source == leg.link.peer.rank, leg
                assert leg.state is not LegState.DRAINING or room.failure, leg


@dataclass(slots=True, eq=False)
class Scattering:
    """A scatter that is under way."""

    room: TargetRoom
    source: int
    blocks: tuple[Block, ...]
    slot: SlotIndex


class Scatters:
    """Slots whose bytes are being copied into pages."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.under_way: dict[Op, Scattering] = {}
        self._ops = 0

    def __len__(self) -> int:
        return len(self.under_way)

    def begin(
        self, room: TargetRoom, leg: Leg, blocks: tuple[Block, ...], slot: SlotIndex, serial: Serial
    ) -> None:
        """Have a slot copied into the room's pages."""
        self._ops += 1
        op = Op(self._ops)
        room.scatters.add(op)
        self.under_way[op] = Scattering(room, leg.source, blocks, slot)
        what = room.plan, room.wanted.request, blocks
        self._outbox.do(Scatter(op, room.name, leg.link.peer, *what, slot, serial))

    def end(self, op: Op) -> Scattering | None:
        """A slot's bytes are in the pages; None if that was known already."""
        done = self.under_way.pop(op, None)
        if done is None:
            self._outbox.counts["late"] += 1
            return None
        done.room.scatters.discard(op)
        return done

    def writes(self, room: TargetRoom) -> bool:
        """Whether a scatter still writes the room's pages."""
        return bool(room.scatters)

    def check(self) -> None:
        """Every scatter is known to its room, and no slot is scattered twice at once."""
        for op, one in self.under_way.items():
            assert op in one.room.scatters, op
        slots = [one.slot for one in self.under_way.values()]
        assert len(slots) == len(set(slots)), slots
