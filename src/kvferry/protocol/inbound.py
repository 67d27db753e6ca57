"""Rooms of a target, their inbound transfers and their scatters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from kvferry.ids import Generation, Op, Room, Serial, SlotIndex
from kvferry.plan.content import ProofRequest
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.credits import AccountKey
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
    Ask,
    Drained,
    Holding,
    Offer,
    RoomMessage,
    StatusPoll,
)
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import INBOUND, InboundState, InboundStep, LinkState, advance

# Failures after which nothing of a room is usable.
DOUBTED = (FailureCode.CONTENT_DIFFERS, FailureCode.CONTENT_CORRUPT)


@dataclass(slots=True, eq=False)
class InboundTransfer:
    """The blocks that a room expects from one source, and their progress."""

    room: TargetRoom
    source: int
    link: Link
    sent_at: float
    state: InboundState = InboundState.CONNECTING
    offer_seq: int = 0
    accepted: bool = False
    confirmed: bool = False  # the source's Close fits the request
    # The sums of its Close, and whether a comparison with them has begun and succeeded.
    sums: bytes | None = None
    proof_begun: bool = False
    is_proven: bool = False

    @property
    def account(self) -> AccountKey:
        """Key of the source's credits for this room."""
        return self.room.name, self.source

    @property
    def has_delivered(self) -> bool:
        """Whether the source has closed and everything that it owes has arrived."""
        closed = self.state is InboundState.CLOSED
        return closed and not self.room.ledger.missing(self.source)

    def step(self, step: InboundStep) -> None:
        """Advance to the next state."""
        self.state = advance(INBOUND, self.state, step)

    @property
    def is_offered(self) -> bool:
        """Whether the source may have an Offer, and so may write."""
        return self.state not in (InboundState.CONNECTING, InboundState.ASKING)

    def answered(self) -> None:
        """Handle an answer of the source about this room."""
        if self.state is not InboundState.QUIET:
            self.step(InboundStep.ACCEPTED)

    def owes(self, note: Arrived, rank: int, slot_bytes: int) -> bool:
        """Whether the source owes the blocks of a note, and a slot can hold them."""
        room = self.room
        if not all(room.ledger.owes(self.source, block) for block in note.blocks):
            return False
        if note.serial is None:
            return True
        size = image_bytes(room.plan, self.source, rank, room.wanted.request, note.blocks)
        return size <= slot_bytes


@dataclass(slots=True, eq=False)
class TargetRoom:
    """One room of one target rank. ``pulled`` has the length of a pull, once it is known."""

    name: Room
    wanted: ReceiveRequest
    generation: Generation
    plan: Plan
    ledger: Ledger
    inbounds: dict[int, InboundTransfer] = field(default_factory=dict)
    scatters: set[Op] = field(default_factory=set)
    proof: ProofRequest | None = None
    proofs: set[Op] = field(default_factory=set)
    metadata: bytes = b""
    pulled: int | None = None
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
    def num_tokens(self) -> int:
        """Number of tokens to receive: those behind the cached prefix."""
        return self.wanted.request.num_tokens - self.wanted.request.prefix

    @property
    def is_quarantined(self) -> bool:
        """Whether the room has failed and waits for proof from a lost source."""
        return self.failure is not None and any(
            inbound.state is InboundState.DRAINING and inbound.link.state is LinkState.LOST
            for inbound in self.inbounds.values()
        )

    def expired(self) -> Failure:
        """Return the failure of a room at its deadline."""
        late = [one for one in self.inbounds.values() if not one.has_delivered]
        names = ", ".join(f"{one.link.peer} ({one.state})" for one in late)
        return Failure.of(FailureCode.DEADLINE, f"still waiting for {names}")

    def unusable(self) -> tuple[Block, ...]:
        """Return the blocks of a failed room that did not arrive or can't be trusted.

        If the engine gave a digest, only blocks from sources with a fitting Close are usable.
        """
        differs = self.failure is not None and self.failure.code in DOUBTED
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

    def token_refusal(self, request: Request) -> Failure | None:
        """Return why a request's tokens do not fit beside those of all open rooms."""
        most = self._links.config.max_tokens
        if most is None:
            return None
        num_open = sum(room.num_tokens for room in self._rooms.values())
        if num_open + request.num_tokens - request.prefix <= most:
            return None
        text = f"{num_open} tokens are being received here, and {most} at most; retry later"
        return Failure.of(FailureCode.TOO_MANY_ROOMS, text)

    def find(self, link: Link, body: RoomMessage) -> InboundTransfer | None:
        """Return the transfer that a message is about, if this attempt is still active."""
        room = self._rooms.get(body.room)
        if room is None or room.generation != body.generation:
            self._outbox.counts["late"] += 1
            return None
        inbound = room.inbounds.get(link.peer.rank)
        if inbound is None or inbound.link is not link:
            return None
        if isinstance(body, Holding):
            # It may come before the source's engine has opened the room.
            return inbound
        if not inbound.is_offered and not isinstance(body, Abort | Drained):
            self._outbox.counts["misdirected"] += 1
            return None
        inbound.accepted = True
        return inbound

    def of(self, link: Link) -> Iterator[InboundTransfer]:
        """Yield the transfers of a link."""
        for room in list(self._rooms.values()):
            for inbound in room.inbounds.values():
                if inbound.link is link:
                    yield inbound

    def ask(self, inbound: InboundTransfer) -> None:
        """Send Ask, if the source knows it."""
        room = inbound.room
        chain, prefix = room.wanted.chain, room.wanted.request.prefix
        assert chain is not None
        if inbound.state is InboundState.CONNECTING:
            inbound.step(InboundStep.ASK)
        if inbound.link.answers:
            remaining_s = self._remaining_s(room)
            self._send(inbound, Ask(room.name, room.generation, chain.short, prefix, remaining_s))

    def _remaining_s(self, room: TargetRoom) -> float:
        left_s = room.wanted.deadline - self._outbox.now
        return min(max(MIN_REMAINING_S, left_s), MAX_REMAINING_S)

    def offer(self, inbound: InboundTransfer) -> None:
        """Send Offer."""
        room = inbound.room
        if not inbound.is_offered:
            inbound.step(InboundStep.LINKED)
        remaining_s = self._remaining_s(room)
        request, tables = room.wanted.request, room.wanted.tables
        offer = Offer(room.name, room.generation, request, tables, remaining_s, room.proof)
        self._send(inbound, offer)
        inbound.offer_seq = inbound.link.seq_out

    def abort(self, inbound: InboundTransfer) -> None:
        """Send Abort."""
        room = inbound.room
        assert room.failure is not None
        self._send(inbound, Abort(room.name, room.generation, room.failure, inbound.accepted))

    def _send(self, inbound: InboundTransfer, body: Ask | Offer | StatusPoll | Abort) -> None:
        inbound.sent_at = self._outbox.now
        self._links.send(inbound.link, body)

    def repeat_at(self, inbound: InboundTransfer) -> float:
        """Return when to resend the last message or poll the source."""
        config = self._links.config
        match inbound.state:
            case InboundState.ASKING | InboundState.OFFERED | InboundState.DRAINING:
                return inbound.sent_at + config.resend_s
            case InboundState.ACCEPTED | InboundState.CLOSED:
                return inbound.sent_at + config.status_poll_s
            case InboundState.CONNECTING | InboundState.QUIET:
                return inf

    def repeat(self, inbound: InboundTransfer, serials: tuple[Serial, ...]) -> None:
        """Resend what may have been lost. ``serials`` are the unused credits."""
        if inbound.state is InboundState.ASKING:
            self.ask(inbound)
        elif inbound.state is InboundState.OFFERED:
            self.offer(inbound)
        elif inbound.state is InboundState.DRAINING:
            self.abort(inbound)
        else:
            room = inbound.room
            self._send(inbound, StatusPoll(room.name, room.generation, serials[:MAX_CREDITS]))

    def is_quiet(self, room: TargetRoom) -> bool:
        """Whether every source provably writes nothing more for the room."""
        return all(inbound.state is InboundState.QUIET for inbound in room.inbounds.values())

    def check(self) -> None:
        """Check each transfer's source, and that only failed rooms drain."""
        for name, room in self._rooms.items():
            assert room.name == name, room
            for source, inbound in room.inbounds.items():
                assert inbound.room is room, inbound
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

    def begin(self, inbound: InboundTransfer, note: Arrived, slot: SlotIndex) -> None:
        """Start to copy a slot into the room's pages."""
        assert note.serial is not None
        self._ops += 1
        op = Op(self._ops)
        room, peer = inbound.room, inbound.link.peer
        room.scatters.add(op)
        self.under_way[op] = ActiveScatter(room, inbound.source, note.blocks, slot)
        about = room.plan, room.wanted.request, note.blocks
        self._outbox.do(Scatter(op, room.name, peer, *about, slot, note.serial))

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
