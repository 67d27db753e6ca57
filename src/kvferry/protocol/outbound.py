"""A source's rooms and outbounds: what is owed, what waits, what is in flight.

A outbound is what a source owes one target in one room. ``OutboundTransfers`` says what the source
has to say
about it at its end: that all is written, or that nothing more will be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from kvferry.config import ProtocolConfig
from kvferry.ids import Generation, Op, Peer, Room, Serial, SlotIndex, Ticket
from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import StateRow
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.cutting import image_bytes, join_layers, merge, within
from kvferry.protocol.events import Finish, Push, TransferRequest
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    Arrived,
    Close,
    Credit,
    Drained,
    RoomMessage,
    StatusPoll,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import (
    OUTBOUND,
    LinkState,
    OutboundState,
    OutboundStep,
    RoomState,
    advance,
)

# Blocks in one write. More go into the next one.
MAX_BLOCKS_PER_WRITE = 256


@dataclass(slots=True, eq=False)
class OutboundTransfer:
    """What this source owes one target in one room, and how far it has come."""

    room: SourceRoom
    link: Link
    transfer: TransferRequest
    owed: tuple[Block, ...]
    said_at: float
    state: OutboundState = OutboundState.SENDING
    # Questions about how its blocks travel that were not answered yet.
    undecided: set[Ticket] = field(default_factory=set)
    direct: deque[Block] = field(default_factory=deque)
    staged: deque[Block] = field(default_factory=deque)
    # Writes whose slots are gathered, or being gathered, and wait for their credits.
    held: deque[Op] = field(default_factory=deque)
    # Credits that were said to be needed over the outbound's life, and of these, those for what
    # was announced, chunk by chunk, and is not pushed yet.
    wanted: int = 0
    expected: dict[Span, int] = field(default_factory=dict)
    # How the blocks of a chunk that was announced are cut, until it is pushed.
    cuts: dict[Span, dict[Block, list[Block]]] = field(default_factory=dict)
    waiting_since: float = 0.0
    busy_until: float = 0.0
    credit: dict[Serial, SlotIndex] = field(default_factory=dict)
    used: set[Serial] = field(default_factory=set)
    notes: dict[Serial, Arrived] = field(default_factory=dict)
    written: list[Block] = field(default_factory=list)
    inflight: set[Op] = field(default_factory=set)

    @property
    def peer(self) -> Peer:
        """The target."""
        return self.link.peer

    @property
    def generation(self) -> Generation:
        """Which attempt of the target at the room this serves."""
        return self.transfer.generation

    @property
    def request(self) -> Request:
        """The target's request."""
        return self.transfer.request

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting to be written or being written."""
        return not (self.undecided or self.direct or self.staged or self.inflight)

    @property
    def num_needed(self) -> int:
        """Credits that this outbound needs over its life, as far as is known."""
        waiting = len(self.staged) + len(self.held)
        return len(self.used) + waiting + sum(self.expected.values())

    @property
    def awaits_credit(self) -> bool:
        """Whether something waits that is to go through a slot, gathered or not."""
        return bool(self.staged or self.held)

    @property
    def may_stage(self) -> bool:
        """Whether the target has slots at all."""
        return self.link.hello is not None and self.link.hello.staging.num_slots > 0

    @property
    def slot_bytes(self) -> int:
        """What a slot of the target holds."""
        assert self.link.hello is not None
        return self.link.hello.staging.slot_bytes

    def repeat_at(self, config: ProtocolConfig) -> float:
        """When something has to be said again, or is no longer to be waited for."""
        if self.state is OutboundState.CLOSED:
            return self.said_at + config.resend_s
        if self.state is OutboundState.SENDING and self.busy_until > 0:
            return self.busy_until
        if self.state is OutboundState.SENDING and self.awaits_credit:
            patience = self.waiting_since + config.credit_patience_s
            return min(patience, self.said_at + config.resend_s)
        return inf

    @property
    def all_layers(self) -> Span:
        """Every layer of the model."""
        return Span(0, self.transfer.plan.spec.num_layers)

    def is_news(self, tokens: Span) -> bool:
        """Whether those tokens were not announced, and something of them was not pushed."""
        return tokens not in self.expected and self.room.lacks_of(self, tokens)

    def expects(self, tokens: Span) -> bool:
        """Whether some of those tokens were announced."""
        return any(len(span.intersect(tokens)) for span in self.expected)

    def met(self, tokens: Span, num_staged: int) -> None:
        """So many fragments of what was expected wait for their credits now."""
        for span, count in self.expected.items():
            if len(span.intersect(tokens)):
                self.expected[span] = max(0, count - num_staged)

    def is_able(self, now: float) -> bool:
        """Whether the outbound may write at all."""
        running = self.room.state in (RoomState.OPEN, RoomState.FINISHED)
        return running and self.state is OutboundState.SENDING and now >= self.busy_until

    def use_credit(self, now: float) -> Credit:
        """Take the oldest credit. There must be one."""
        serial = min(self.credit)
        self.used.add(serial)
        self.waiting_since = now
        return Credit(serial, self.credit.pop(serial))

    def fill(self, count: int) -> tuple[Block, ...]:
        """Take so many of the fragments that wait for slots, as one."""
        blocks = [self.staged.popleft() for _ in range(count)]
        return join_layers(self.transfer.plan.spec, blocks)

    def num_fitting(self, local_slot_bytes: int) -> int:
        """How many of the fragments that wait fit one slot together. The first always does."""
        left_bytes = most_bytes = min(self.slot_bytes, local_slot_bytes)
        about = self.transfer.plan, self.transfer.source, self.peer.rank, self.request
        for count, block in enumerate(islice(self.staged, MAX_BLOCKS_PER_WRITE)):
            # Large requests are cut so that each fragment fills a slot: no second look, then.
            if count and left_bytes < most_bytes // 4:
                return count
            left_bytes -= image_bytes(*about, [block])
            if left_bytes < 0 and count:
                return count
        return min(len(self.staged), MAX_BLOCKS_PER_WRITE)

    def drop_pending(self) -> None:
        """Forget what has not been submitted."""
        self.direct.clear()
        self.staged.clear()


@dataclass(slots=True, eq=False)
class SourceRoom:
    """One room of one source rank. ``plan`` and ``instance`` come with the first offer."""

    name: Room
    state: RoomState
    deadline: float
    plan: Plan | None = None
    instance: str | None = None
    pushes: list[Push] = field(default_factory=list)
    pushed: Coverage = field(default_factory=Coverage)
    rows: SpanSet = field(default_factory=SpanSet)  # layers whose state rows were pushed
    finish: Finish | None = None
    outbounds: dict[int, OutboundTransfer] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    failure: Failure | None = None

    @property
    def known_to_engine(self) -> bool:
        """Whether the engine has opened it and waits for its end."""
        return self.state not in (RoomState.EARLY, RoomState.WARNED, RoomState.OVER)

    @property
    def status(self) -> Status | None:
        """Where it stands; None if the engine never opened it or knows that it is over."""
        if not self.known_to_engine:
            return None
        if self.failure:
            return Status.FAILED
        if not self.outbounds and not self.served:
            return Status.CONNECTING
        return Status.MOVING if self.pushes else Status.WAITING

    @property
    def is_quarantined(self) -> bool:
        """Whether it has failed and waits for a write to a lost peer to end."""
        lost = any(outbound.link.state is LinkState.LOST for outbound in self.outbounds.values())
        return lost and self.state is RoomState.FAILING

    def awaits(self, peer: Peer) -> bool:
        """Whether an offer of that target would be its first, and of the right instance."""
        return peer.rank not in self.heard and self.instance in (None, peer.instance)

    def hear(self, link: Link) -> None:
        """A target has spoken of the room, by an offer or by giving it up."""
        self.heard.add(link.peer.rank)
        self.plan, self.instance = link.plan, link.peer.instance

    def awaits_offers(self, source: int) -> bool:
        """Whether some target that should tell this source of the room has not done so."""
        return self.plan is None or not self.heard.issuperset(self.plan.audience(source))

    def unpushed(self) -> Failure | None:
        """Return whether a finished transfer can never close and must fail before its deadline."""
        for outbound in self.outbounds.values():
            block = next(self._lacking(outbound, paged(outbound)), None)
            if block is not None:
                text = f"{block!r} was never pushed; pushed were {self.pushed!r}"
                return Failure.of(FailureCode.NOT_ALL_PUSHED, text)
        return None

    def expired(self) -> Failure:
        """Why it ends at its deadline."""
        text = "not everything was sent" if self.outbounds or self.served else "no offer came"
        return Failure.of(FailureCode.DEADLINE, text)

    def lacks_of(self, outbound: OutboundTransfer, tokens: Span) -> bool:
        """Whether some layer of those tokens, as far as the outbound owes it, was not pushed."""
        return any(
            True for _ in self._lacking(outbound, chunk(outbound, tokens, outbound.all_layers))
        )

    def _lacking(self, outbound: OutboundTransfer, blocks: Iterable[Block]) -> Iterator[Block]:
        spec = outbound.link.plan.spec
        for block in blocks:
            for strip in self.pushed.gaps(block.layers, block.tokens):
                # An engine need not push layers that have nothing of the group.
                if spec.group(block.group).layers_in(strip.layers):
                    yield Block(block.group, strip.layers, strip.tokens.spans[0])


@dataclass(slots=True, eq=False)
class ActiveWrite:
    """A write that is under way, or whose fate is unknown."""

    outbound: OutboundTransfer
    blocks: tuple[Block, ...]
    credit: Credit | None
    local_slot: SlotIndex | None
    is_taken_back: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether it was gathered, and has never had a credit."""
        return self.local_slot is not None and self.credit is None

    def record(self) -> None:
        """It is in the target's memory: remember it for a Close, or for a note said again."""
        if self.credit is None:
            self.outbound.written.extend(self.blocks)
        else:
            self.outbound.notes[self.credit.serial] = self.note()

    def note(self) -> Arrived:
        """Return what its target is told once the data is there."""
        serial = self.credit.serial if self.credit else None
        return Arrived(self.outbound.room.name, self.outbound.generation, self.blocks, serial)


def paged(outbound: OutboundTransfer) -> list[Block]:
    """What follows tokens, and so becomes available push by push."""
    groups = outbound.link.plan.spec
    return [b for b in outbound.owed if not isinstance(groups.group(b.group).kind, StateRow)]


def states(outbound: OutboundTransfer, layers: Span) -> list[Block]:
    """State rows of those layers."""
    spec = outbound.link.plan.spec
    rows = (b for b in outbound.owed if isinstance(spec.group(b.group).kind, StateRow))
    return within(spec, rows, layers)


def chunk(outbound: OutboundTransfer, tokens: Span, layers: Span) -> list[Block]:
    """What those tokens of those layers are of what the outbound owes."""
    return within(outbound.link.plan.spec, paged(outbound), layers, tokens)


def num_expected(outbound: OutboundTransfer, tokens: Span, layers: Span, num_staged: int) -> int:
    """Credits that the other layers of a chunk will need if those of its first push need so many.

    They are likely to go the way that these go, because they have the same pages.
    """
    spec = outbound.link.plan.spec
    mine, whole = (
        sum(len(spec.group(b.group).layers_in(b.layers)) for b in chunk(outbound, tokens, some))
        for some in (layers, Span(0, spec.num_layers))
    )
    return -(-num_staged * (whole - mine) // mine) if mine else 0


class OutboundTransfers:
    """Every outbound of every room, and its last words."""

    def __init__(self, rooms: Mapping[Room, SourceRoom], links: Links, outbox: Outbox) -> None:
        self._rooms = rooms
        self._links = links
        self._outbox = outbox

    def find(self, link: Link, body: RoomMessage) -> OutboundTransfer | None:
        """Return the outbound that a message is about, if that attempt at the room is still on."""
        room = self._rooms.get(body.room)
        outbound = room.outbounds.get(link.peer.rank) if room else None
        if outbound is None or outbound.link is not link or outbound.generation != body.generation:
            return None
        return outbound

    def of(self, link: Link) -> Iterator[OutboundTransfer]:
        """Yield the outbounds that a link carries."""
        for room in list(self._rooms.values()):
            for outbound in list(room.outbounds.values()):
                if outbound.link is link:
                    yield outbound

    def close(self, outbound: OutboundTransfer) -> None:
        """Everything is written: say so, now and until the target answers."""
        outbound.state = advance(OUTBOUND, outbound.state, OutboundStep.CLOSE)
        self.repeat_close(outbound)

    def repeat_close(self, outbound: OutboundTransfer) -> None:
        """Say that a outbound is closed, with everything that no note has told."""
        finish, me = outbound.room.finish, self._links.identity
        assert finish is not None
        written = merge(outbound.transfer.plan.spec, outbound.written)
        named, rest = written[:MAX_BLOCKS], written[MAX_BLOCKS:]
        for at in range(0, len(rest), MAX_BLOCKS):
            some = Arrived(outbound.room.name, outbound.generation, rest[at : at + MAX_BLOCKS])
            self._links.note(outbound.peer, outbound.link.session, some)
        metadata = finish.metadata if me.peer.rank == me.layout.lead else None
        outbound.said_at = self._outbox.now
        about = outbound.room.name, outbound.generation, finish.num_tokens
        self._links.say(outbound.link, Close(*about, named, metadata, finish.digest))

    def status_polled(self, link: Link, body: StatusPoll) -> None:
        """A target asks how far a outbound is: repeat what it may have missed."""
        outbound = self.find(link, body)
        if outbound is None:
            text = f"room {body.room!r} is not known here"
            self.drained(link, body, Failure.of(FailureCode.UNKNOWN_ROOM, text))
            return
        for serial in body.serials:
            if serial in outbound.notes:
                self._links.note(link.peer, link.session, outbound.notes[serial])
        if outbound.state is OutboundState.CLOSED:
            self.repeat_close(outbound)

    def drained(self, link: Link, about: RoomMessage, failure: Failure) -> None:
        """Say that nothing is written for an attempt at a room any more."""
        link.remember_drained(about.room, about.generation, self._outbox.now)
        self._links.say(link, Drained(about.room, about.generation, failure, link.seq_in))

    def check(self) -> None:
        """Every outbound is of its room and of its target's rank, and a closed one has ended."""
        for room in self._rooms.values():
            for rank, outbound in room.outbounds.items():
                assert outbound.room is room, outbound
                assert outbound.peer.rank == rank, outbound
                assert outbound.state is not OutboundState.CLOSED or outbound.idle, outbound
