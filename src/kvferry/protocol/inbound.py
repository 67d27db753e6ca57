"""Rooms of a target, their inbound transfers and their scatters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from kvferry.ids import Generation, Op, Room, Serial, SlotIndex
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.cutting import image_bytes
from kvferry.protocol.events import Outbox, ReceiveRequest, Scatter
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import (
    MAX_CREDITS,
    MAX_REMAINING_S,
    MIN_REMAINING_S,
    Abort,
    Arrived,
    Offer,
    RoomMessage,
    StatusPoll,
)
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import INBOUND, InboundState, InboundStep, LinkState, advance


@dataclass(slots=True, eq=False)
class InboundTransfer:
    """What a room expects from one source."""

    source: int
    link: Link
    sent_at: float
    state: InboundState = InboundState.CONNECTING
    offer_seq: int = 0
    accepted: bool = False
    confirmed: bool = False  # the source's Close fits the request

    def step(self, step: InboundStep) -> None:
        """Advance to the next state."""
        self.state = advance(INBOUND, self.state, step)

    def answered(self) -> None:
        """Handle an answer of the source about this room."""
        if self.state is not InboundState.QUIET:
            self.step(InboundStep.ACCEPTED)


@dataclass(slots=True, eq=False)
class TargetRoom:
    """One room of one target rank."""

    name: Room
    wanted: ReceiveRequest
    generation: Generation
    plan: Plan
    deadline: float
    ledger: Ledger
    inbounds: dict[int, InboundTransfer] = field(default_factory=dict)
    scatters: set[Op] = field(default_factory=set)
    metadata: bytes = b""
    failure: Failure | None = None

    @property
    def status(self) -> Status:
        """Progress of the room."""
        if self.failure:
            return Status.FAILED
        if any(inbound.state is InboundState.CONNECTING for inbound in self.inbounds.values()):
            return Status.CONNECTING
        return Status.MOVING if self.ledger.begun else Status.WAITING

    @property
    def is_quarantined(self) -> bool:
        """Whether the room has failed and waits for proof from a lost source."""
        return self.failure is not None and any(
            inbound.state is InboundState.DRAINING and inbound.link.state is LinkState.LOST
            for inbound in self.inbounds.values()
        )

    def owes(self, inbound: InboundTransfer, note: Arrived, rank: int, slot_bytes: int) -> bool:
        """Whether the source owes the blocks of a note, and a slot can hold them."""
        if not all(self.ledger.owes(inbound.source, block) for block in note.blocks):
            return False
        if note.serial is None:
            return True
        size = image_bytes(self.plan, inbound.source, rank, self.wanted.request, note.blocks)
        return size <= slot_bytes

    def expired(self) -> Failure:
        """Return the failure of a room at its deadline."""
        late = [
            f"{inbound.link.peer} ({inbound.state})"
            for inbound in self.inbounds.values()
            if inbound.state is not InboundState.CLOSED or self.ledger.missing(inbound.source)
        ]
        return Failure.of(FailureCode.DEADLINE, f"still waiting for {', '.join(late)}")

    def unusable(self) -> tuple[Block, ...]:
        """Return the blocks of a failed room that did not arrive or can't be trusted.

        If the engine gave a digest, only blocks from sources with a fitting Close are usable.
        """
        differs = self.failure is not None and self.failure.code is FailureCode.CONTENT_DIFFERS
        doubted = {
            source
            for source, inbound in self.inbounds.items()
            if differs or (self.wanted.digest and not inbound.confirmed)
        }
        return tuple(self.ledger.lacking(doubted))


class InboundTransfers:
    """Every inbound transfer of a target, and the messages about them."""

    def __init__(self, rooms: Mapping[Room, TargetRoom], links: Links, outbox: Outbox) -> None:
        self._rooms = rooms
        self._links = links
        self._outbox = outbox

    def find(self, link: Link, body: RoomMessage) -> tuple[TargetRoom, InboundTransfer] | None:
        """Return the transfer that a message is about, if this attempt is still active."""
        room = self._rooms.get(body.room)
        if room is None or room.generation != body.generation:
            self._outbox.counts["late"] += 1
            return None
        inbound = room.inbounds.get(link.peer.rank)
        if inbound is None or inbound.link is not link:
            return None
        inbound.accepted = True
        return room, inbound

    def of(self, link: Link) -> Iterator[tuple[TargetRoom, InboundTransfer]]:
        """Yield the transfers of a link, with their rooms."""
        for room in list(self._rooms.values()):
            for inbound in room.inbounds.values():
                if inbound.link is link:
                    yield room, inbound

    def offer(self, room: TargetRoom, inbound: InboundTransfer) -> None:
        """Send Offer."""
        if inbound.state is InboundState.CONNECTING:
            inbound.step(InboundStep.LINKED)
        left_s = room.deadline - self._outbox.now
        remaining_s = min(max(MIN_REMAINING_S, left_s), MAX_REMAINING_S)
        request, tables = room.wanted.request, room.wanted.tables
        self._send(inbound, Offer(room.name, room.generation, request, tables, remaining_s))
        inbound.offer_seq = inbound.link.seq_out

    def abort(self, room: TargetRoom, inbound: InboundTransfer) -> None:
        """Send Abort."""
        assert room.failure is not None
        self._send(inbound, Abort(room.name, room.generation, room.failure, inbound.accepted))

    def _send(self, inbound: InboundTransfer, body: Offer | StatusPoll | Abort) -> None:
        inbound.sent_at = self._outbox.now
        self._links.send(inbound.link, body)

    def repeat_at(self, inbound: InboundTransfer) -> float:
        """Return when to resend the last message or poll the source."""
        config = self._links.config
        match inbound.state:
            case InboundState.OFFERED | InboundState.DRAINING:
                return inbound.sent_at + config.resend_s
            case InboundState.ACCEPTED | InboundState.CLOSED:
                return inbound.sent_at + config.status_poll_s
            case InboundState.CONNECTING | InboundState.QUIET:
                return inf

    def repeat(
        self, room: TargetRoom, inbound: InboundTransfer, serials: tuple[Serial, ...]
    ) -> None:
        """Resend what may have been lost. ``serials`` are the unused credits."""
        if inbound.state is InboundState.OFFERED:
            self.offer(room, inbound)
        elif inbound.state is InboundState.DRAINING:
            self.abort(room, inbound)
        else:
            self._send(inbound, StatusPoll(room.name, room.generation, serials[:MAX_CREDITS]))

    def is_quiet(self, room: TargetRoom) -> bool:
        """Whether every source provably writes nothing more for the room."""
        return all(inbound.state is InboundState.QUIET for inbound in room.inbounds.values())

    def check(self) -> None:
        """Check each transfer's source, and that only failed rooms drain."""
        for name, room in self._rooms.items():
            assert room.name == name, room
            for source, inbound in room.inbounds.items():
                assert inbound.source == source == inbound.link.peer.rank, inbound
                assert inbound.state is not InboundState.DRAINING or room.failure, inbound


@dataclass(slots=True, eq=False)
class ActiveScatter:
    """A scatter in progress."""

    room: TargetRoom
    source: int
    blocks: tuple[Block, ...]
    slot: SlotIndex


class ActiveScatters:
    """Scatters in progress."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.under_way: dict[Op, ActiveScatter] = {}
        self._ops = 0

    def begin(
        self,
        room: TargetRoom,
        inbound: InboundTransfer,
        blocks: tuple[Block, ...],
        slot: SlotIndex,
        serial: Serial,
    ) -> None:
        """Start to copy a slot into the room's pages."""
        self._ops += 1
        op = Op(self._ops)
        room.scatters.add(op)
        self.under_way[op] = ActiveScatter(room, inbound.source, blocks, slot)
        peer, request = inbound.link.peer, room.wanted.request
        self._outbox.do(Scatter(op, room.name, peer, room.plan, request, blocks, slot, serial))

    def end(self, op: Op) -> ActiveScatter | None:
        """Remove and return a scatter that has ended; None if it was removed before."""
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
        """Check that each scatter is known to its room and has its own slot."""
        for op, one in self.under_way.items():
            assert op in one.room.scatters, op
        slots = [one.slot for one in self.under_way.values()]
        assert len(slots) == len(set(slots)), slots
