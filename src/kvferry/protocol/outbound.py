"""Rooms of a source and their outbound transfers: blocks that are owed, queued and in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Generation, Op, Peer, Room, Serial, SlotIndex, Ticket
from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import StateRow
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.cutting import image_bytes, join_layers, merge, within
from kvferry.protocol.events import Finish, Outbox, Push, TransferRequest
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    Arrived,
    Close,
    Credit,
    Drained,
    RoomMessage,
    Staging,
    StatusPoll,
)
from kvferry.protocol.outcome import Failure, FailureCode, Status
from kvferry.protocol.states import (
    OUTBOUND,
    LinkState,
    OutboundState,
    OutboundStep,
    RoomState,
    advance,
)

# Maximum number of blocks in one write.
MAX_BLOCKS_PER_WRITE = 256


@dataclass(slots=True, eq=False)
class OutboundTransfer:
    """The blocks that this source owes one target in one room, and their progress."""

    room: SourceRoom
    link: Link
    transfer: TransferRequest
    owed: tuple[Block, ...]
    sent_at: float
    state: OutboundState = OutboundState.SENDING
    # Unanswered ``Choose`` actions.
    undecided: set[Ticket] = field(default_factory=set)
    direct: deque[Block] = field(default_factory=deque)
    staged: deque[Block] = field(default_factory=deque)
    # Early gathers that wait for their credits.
    held: deque[Op] = field(default_factory=deque)
    # Total of the last Want. ``expected`` has the credits among them for chunks that were
    # announced and not pushed completely, by the tokens of the chunk.
    wanted: int = 0
    expected: dict[Span, int] = field(default_factory=dict)
    # Fragments of announced chunks, until these are pushed.
    cuts: dict[Span, dict[Block, list[Block]]] = field(default_factory=dict)
    waiting_since: float = 0.0
    busy_until: float = 0.0
    credit: dict[Serial, SlotIndex] = field(default_factory=dict)
    used: set[Serial] = field(default_factory=set)
    notes: dict[Serial, Arrived] = field(default_factory=dict)
    written: list[Block] = field(default_factory=list)
    inflight: set[Op] = field(default_factory=set)
    # The sums that the target asks for, and whether they are being computed.
    is_proving: bool = False
    sums: bytes | None = None
    # The owed blocks of tokens, which become available push by push, and of state rows.
    paged: list[Block] = field(init=False)
    rows: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        self.paged, self.rows = [], []
        for block in self.owed:
            kind = self.transfer.plan.spec.group(block.group).kind
            (self.rows if isinstance(kind, StateRow) else self.paged).append(block)

    @property
    def peer(self) -> Peer:
        """The target's id."""
        return self.link.peer

    @property
    def generation(self) -> Generation:
        """The target's attempt at the room."""
        return self.transfer.generation

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not (self.undecided or self.direct or self.staged or self.inflight)

    @property
    def num_needed(self) -> int:
        """Number of credits needed over the transfer's lifetime, as far as known."""
        waiting = len(self.staged) + len(self.held)
        return len(self.used) + waiting + sum(self.expected.values())

    @property
    def awaits_credit(self) -> bool:
        """Whether fragments wait for a credit, gathered or not."""
        return bool(self.staged or self.held)

    @property
    def staging(self) -> Staging:
        """The target's staging pool."""
        assert self.link.hello is not None
        return self.link.hello.staging

    @property
    def all_layers(self) -> Span:
        """Every layer of the model."""
        return Span(0, self.transfer.plan.spec.num_layers)

    def repeat_at(self, config: ProtocolConfig) -> float:
        """Return when to resend, to retry, or to stop waiting for credits."""
        if self.state is OutboundState.CLOSED:
            return self.sent_at + config.resend_s
        if self.state is OutboundState.SENDING and self.busy_until > 0:
            return self.busy_until
        if self.state is OutboundState.SENDING and self.awaits_credit:
            patience = self.waiting_since + config.credit_patience_s
            return min(patience, self.sent_at + config.resend_s)
        return inf

    def can_announce(self, tokens: Span) -> bool:
        """Whether ``tokens`` were not announced yet, and not pushed completely."""
        return tokens not in self.expected and self.room.lacks(self, tokens)

    def update_expected(self, push: Push, num_staged: int) -> None:
        """Update the expected credits after a push that queued ``num_staged`` fragments."""
        announced = [span for span in self.expected if len(span.intersect(push.tokens))]
        if push.layers is not None and not announced:
            rest = self._credits_of_other_layers(push.tokens, push.layers, num_staged)
            self.expected[push.tokens] = rest
        for span in announced:
            self.expected[span] = max(0, self.expected[span] - num_staged)
        self.expected = {
            span: count for span, count in self.expected.items() if self.room.lacks(self, span)
        }

    def _credits_of_other_layers(self, tokens: Span, layers: Span, num_staged: int) -> int:
        """Return the credits for the rest of a chunk if its other layers are cut like these.

        They probably are, because they have the same pages.
        """
        spec = self.transfer.plan.spec
        pushed, total = (
            sum(len(spec.group(b.group).layers_in(b.layers)) for b in self.chunk(tokens, some))
            for some in (layers, self.all_layers)
        )
        return -(-num_staged * (total - pushed) // pushed) if pushed else 0

    def can_write(self, now: float) -> bool:
        """Whether writes of this transfer may start."""
        running = self.room.state in (RoomState.OPEN, RoomState.FINISHED)
        return running and self.state is OutboundState.SENDING and now >= self.busy_until

    def use_credit(self, now: float) -> Credit:
        """Take the oldest credit, which must exist."""
        serial = min(self.credit)
        self.used.add(serial)
        self.waiting_since = now
        return Credit(serial, self.credit.pop(serial))

    def take_staged(self, count: int) -> tuple[Block, ...]:
        """Take the first ``count`` queued fragments, merged for one write."""
        blocks = [self.staged.popleft() for _ in range(count)]
        return join_layers(self.transfer.plan.spec, blocks)

    def num_fitting(self, local_slot_bytes: int) -> int:
        """Return how many queued fragments fit one slot together, at least one."""
        left_bytes = max_bytes = min(self.staging.slot_bytes, local_slot_bytes)
        about = self.transfer.plan, self.transfer.source, self.peer.rank, self.transfer.request
        for count, block in enumerate(islice(self.staged, MAX_BLOCKS_PER_WRITE)):
            # Large requests are cut so that each fragment fills a slot; skip measuring the next.
            if count and left_bytes < max_bytes // 4:
                return count
            left_bytes -= image_bytes(*about, [block])
            if left_bytes < 0 and count:
                return count
        return min(len(self.staged), MAX_BLOCKS_PER_WRITE)

    def state_rows(self, layers: Span) -> list[Block]:
        """Return the owed state rows of ``layers``."""
        return within(self.transfer.plan.spec, self.rows, layers)

    def chunk(self, tokens: Span, layers: Span) -> list[Block]:
        """Return the owed blocks of ``tokens`` and ``layers``."""
        return within(self.transfer.plan.spec, self.paged, layers, tokens)


@dataclass(slots=True, eq=False)
class PushedSpans:
    """Pushed part of a room: tokens of layers, and the state rows of ``rows``."""

    tokens: Coverage = field(default_factory=Coverage)
    rows: SpanSet = field(default_factory=SpanSet)

    def check(self, push: Push, layers: Span) -> None:
        """Raise ``Misuse`` if some of a push of ``layers`` was pushed before."""
        if self.tokens.overlaps(layers, push.tokens):
            raise Misuse(
                f"room {push.room!r}: some of the tokens {push.tokens} of layers {layers} were "
                f"pushed before; push each once"
            )
        if push.states and self.rows.overlaps(layers):
            raise Misuse(
                f"room {push.room!r}: state rows of layers {layers} were pushed before; "
                f"push each once"
            )

    def add(self, push: Push, layers: Span) -> None:
        """Record a push of ``layers``."""
        self.tokens.add(layers, push.tokens)
        if push.states:
            self.rows.add(layers)


@dataclass(slots=True, eq=False)
class SourceRoom:
    """One room of one source rank. ``plan`` and ``instance`` are known from the first offer.

    ``known_targets`` are the ranks that have sent an Offer or an Abort.
    """

    name: Room
    state: RoomState
    deadline: float
    plan: Plan | None = None
    instance: str | None = None
    pushes: list[Push] = field(default_factory=list)
    pushed: PushedSpans = field(default_factory=PushedSpans)
    finish: Finish | None = None
    outbounds: dict[int, OutboundTransfer] = field(default_factory=dict)
    known_targets: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    failure: Failure | None = None

    @property
    def known_to_engine(self) -> bool:
        """Whether the engine has opened the room and waits for its outcome."""
        return self.state not in (RoomState.EARLY, RoomState.WARNED, RoomState.OVER)

    @property
    def status(self) -> Status | None:
        """Progress; None if the engine has not opened the room or knows its outcome."""
        if not self.known_to_engine:
            return None
        if self.failure:
            return Status.FAILED
        if not self.outbounds and not self.served:
            return Status.CONNECTING
        return Status.MOVING if self.pushes else Status.WAITING

    @property
    def is_quarantined(self) -> bool:
        """Whether the room has failed and waits for a write to a lost peer to end."""
        lost = any(outbound.link.state is LinkState.LOST for outbound in self.outbounds.values())
        return lost and self.state is RoomState.FAILING

    def expects(self, peer: Peer) -> bool:
        """Whether this target belongs to the room's instance and has not sent anything yet."""
        return peer.rank not in self.known_targets and self.instance in (None, peer.instance)

    def record_target(self, link: Link) -> None:
        """Record that a target has sent an Offer or an Abort."""
        self.known_targets.add(link.peer.rank)
        self.plan, self.instance = link.plan, link.peer.instance

    def expects_targets(self, source: int) -> bool:
        """Whether some target of the room has not sent anything to this source yet."""
        return self.plan is None or not self.known_targets.issuperset(self.plan.audience(source))

    def push_problem(self) -> Failure | None:
        """Return why a finished room can never close: some blocks were not pushed."""
        for outbound in self.outbounds.values():
            block = next(self._unpushed(outbound, outbound.paged), None)
            if block is not None:
                text = f"{block!r} was never pushed; pushed were {self.pushed.tokens!r}"
                return Failure.of(FailureCode.NOT_ALL_PUSHED, text)
        return None

    def expired(self) -> Failure:
        """Return the failure of a room at its deadline."""
        text = "not everything was sent" if self.outbounds or self.served else "no offer came"
        return Failure.of(FailureCode.DEADLINE, text)

    def lacks(self, outbound: OutboundTransfer, tokens: Span) -> bool:
        """Whether ``outbound`` owes some layer of ``tokens`` that was not pushed."""
        blocks = outbound.chunk(tokens, outbound.all_layers)
        return any(True for _ in self._unpushed(outbound, blocks))

    def _unpushed(self, outbound: OutboundTransfer, blocks: Iterable[Block]) -> Iterator[Block]:
        spec = outbound.transfer.plan.spec
        for block in blocks:
            for strip in self.pushed.tokens.gaps(block.layers, block.tokens):
                # An engine may leave out layers that are not in the group.
                if spec.group(block.group).layers_in(strip.layers):
                    yield Block(block.group, strip.layers, strip.tokens.spans[0])


@dataclass(slots=True, eq=False)
class ActiveWrite:
    """A write that is in flight, or whose fate is unknown."""

    outbound: OutboundTransfer
    blocks: tuple[Block, ...]
    credit: Credit | None
    local_slot: SlotIndex | None
    is_reclaimed: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether it is an early gather without a credit."""
        return self.local_slot is not None and self.credit is None

    def record(self) -> None:
        """Record a completed write, for the Close or for repeating its note."""
        if self.credit is None:
            self.outbound.written.extend(self.blocks)
        else:
            self.outbound.notes[self.credit.serial] = self.note()

    def note(self) -> Arrived:
        """Return the message that follows the data."""
        serial = self.credit.serial if self.credit else None
        return Arrived(self.outbound.room.name, self.outbound.generation, self.blocks, serial)


class OutboundTransfers:
    """Every outbound transfer of a source, and the messages that end it."""

    def __init__(self, rooms: Mapping[Room, SourceRoom], links: Links, outbox: Outbox) -> None:
        self._rooms = rooms
        self._links = links
        self._outbox = outbox

    def find(self, link: Link, body: RoomMessage) -> OutboundTransfer | None:
        """Return the transfer that a message is about, if that attempt is still active."""
        room = self._rooms.get(body.room)
        outbound = room.outbounds.get(link.peer.rank) if room else None
        if outbound is None or outbound.link is not link or outbound.generation != body.generation:
            return None
        return outbound

    def of(self, link: Link) -> Iterator[OutboundTransfer]:
        """Yield the transfers of a link."""
        for room in list(self._rooms.values()):
            for outbound in list(room.outbounds.values()):
                if outbound.link is link:
                    yield outbound

    def close(self, outbound: OutboundTransfer) -> None:
        """Send Close, or repeat it, with the blocks that were written without a note."""
        if outbound.state is OutboundState.SENDING:
            outbound.state = advance(OUTBOUND, outbound.state, OutboundStep.CLOSE)
        room, finish, me = outbound.room, outbound.room.finish, self._links.identity
        assert finish is not None
        written = merge(outbound.transfer.plan.spec, outbound.written)
        named, rest = written[:MAX_BLOCKS], written[MAX_BLOCKS:]
        for at in range(0, len(rest), MAX_BLOCKS):
            note = Arrived(room.name, outbound.generation, rest[at : at + MAX_BLOCKS])
            self._links.send_unnumbered(outbound.peer, outbound.link.session, note)
        metadata = finish.metadata if me.peer.rank == me.layout.lead else None
        outbound.sent_at = self._outbox.now
        close = Close(
            *(room.name, outbound.generation, finish.num_tokens), named, metadata, finish.digest,
            outbound.sums,
        )  # fmt: skip
        self._links.send(outbound.link, close)

    def status_polled(self, link: Link, body: StatusPoll) -> None:
        """Repeat the messages that a target may have missed."""
        outbound = self.find(link, body)
        if outbound is None:
            text = f"room {body.room!r} is not known here"
            self.drained(link, body, Failure.of(FailureCode.UNKNOWN_ROOM, text))
            return
        for serial in body.serials:
            if serial in outbound.notes:
                self._links.send_unnumbered(link.peer, link.session, outbound.notes[serial])
        if outbound.state is OutboundState.CLOSED:
            self.close(outbound)

    def drained(self, link: Link, attempt: RoomMessage, failure: Failure) -> None:
        """Tell the target that nothing more is written for an attempt at a room."""
        link.remember_drained(attempt.room, attempt.generation, self._outbox.now)
        self._links.send(link, Drained(attempt.room, attempt.generation, failure, link.seq_in))

    def check(self) -> None:
        """Check each transfer's room and rank, and that nothing of a closed one is pending."""
        for room in self._rooms.values():
            for rank, outbound in room.outbounds.items():
                assert outbound.room is room, outbound
                assert outbound.peer.rank == rank, outbound
                assert outbound.state is not OutboundState.CLOSED or outbound.idle, outbound
