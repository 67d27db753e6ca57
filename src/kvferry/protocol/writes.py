"""Credits and writes of a source: what may start now, and what an ended write means.

Lanes take turns. A lane waits for a credit, for a local slot, for one of the
writes in flight to end, or for a busy transport; it never holds one of these
while it waits for another, except a credit, which its pages already back.

What waits is written together: pushes of a few layers each cost as many writes as the
transport has time for, and no more.

Where gathering takes its time, a lane gathers ahead: its next fragments go into local slots
before it has credits for them, and are only posted when these come. Such a write is in flight
from its gather on, so whatever waits for writes to end waits for it too. It holds a local slot
while it waits for a credit, and so half of the slots are never used for that: lanes with
credits go on, whatever becomes of a target.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import islice

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, SlotIndex
from kvferry.layout.intervals import Span
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import image_bytes, join_layers
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.events import (
    Discard,
    Event,
    Fate,
    Gather,
    Post,
    Push,
    SendFailed,
    Sent,
    Write,
)
from kvferry.protocol.handshake import Welcomer
from kvferry.protocol.lanes import (
    Lane,
    SourceRoom,
    StagePolicy,
    Writing,
    chunk,
    cut,
    num_expected,
    states,
)
from kvferry.protocol.messages import Arrived, Credit, Envelope, Want
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LaneState, RoomState

# Blocks in one write. More go into the next one.
MAX_BLOCKS_PER_WRITE = 256
# Direct writes of one lane at a time: one under way and one behind it. What is pushed
# meanwhile waits, and becomes one write.
MAX_DIRECT_PER_LANE = 2


class Writer(Welcomer):
    """The part of a source machine that starts and ends writes."""

    def __init__(self, identity: Identity, config: ProtocolConfig, stages: StagePolicy) -> None:
        super().__init__(identity, config)
        self.stages = stages
        self.writing: dict[Op, Writing] = {}
        # A stack: the slot that was used last is the one that is still in a cache.
        self.local_slots = [SlotIndex(i) for i in reversed(range(config.local_slots))]
        # Ordered sets: lanes that may have something to write, those that wait for a
        # local slot, and those that this step has changed.
        self._ready: dict[Lane, None] = {}
        self._starved: dict[Lane, None] = {}
        self._touched: dict[Lane, None] = {}
        # Those that would gather ahead, if fewer did.
        self._eager: dict[Lane, None] = {}
        # Half of them, or else the only slot, which is taken back from who has no credit.
        only = config.local_slots == 1 < config.max_inflight
        self._most_ahead = 1 if only else min(config.local_slots, config.max_inflight) // 2
        self._ahead_slots = min(config.ahead_slots or 0, self._most_ahead)
        self._ops = 0

    def _take(self, event: Event) -> None:
        match event:
            case Sent():
                self._on_sent(event)
            case SendFailed():
                self._on_send_failed(event)
            case _:
                super()._take(event)

    @abstractmethod
    def _fail(self, room: SourceRoom, failure: Failure) -> None:
        """Fail a room."""

    @abstractmethod
    def _drain(self, room: SourceRoom) -> None:
        """Let go of what a failed room no longer needs."""

    @abstractmethod
    def _close_if_sent(self, lane: Lane) -> None:
        """Send Close if everything is written."""

    # ------------------------------------------------------------ what is to be written

    @property
    def _all_layers(self) -> Span:
        return Span(0, self.layout.spec.num_layers)

    def _layers_of(self, push: Push) -> Span:
        return self._all_layers if push.layers is None else push.layers

    def _expect(self, lane: Lane, tokens: Span) -> None:
        """These tokens will be pushed: ask for the credits that they need."""
        if tokens not in lane.expected and lane.room.lacks_of(lane, tokens):
            blocks = chunk(lane, tokens, self._all_layers)
            cuts = lane.cuts[tokens] = {
                block: fragments for block in blocks if (fragments := self._cut(lane, block))
            }
            lane.expected[tokens] = sum(map(len, cuts.values()))
            self._ask(lane)

    def _send(self, lane: Lane, push: Push) -> None:
        """Have written what a push means for a lane; ask at once for what its rest will need."""
        tokens, layers = push.tokens, self._layers_of(push)
        rows = states(lane, layers) if push.states else []
        known = lane.cuts.pop(tokens, {})
        num_staged = self._enqueue(lane, [*chunk(lane, tokens, layers), *rows], known)
        if push.layers is not None and not lane.expects(tokens):
            lane.expected[tokens] = num_expected(lane, tokens, layers, num_staged)
        else:
            lane.met(tokens, num_staged)
        for span in [span for span in lane.expected if not lane.room.lacks_of(lane, span)]:
            del lane.expected[span]
        self._ask(lane)

    def _send_rest(self, lane: Lane) -> None:
        """All is pushed: state rows that did not go with their layers may be read too."""
        gaps = lane.room.rows.gaps(self._all_layers)
        self._enqueue(lane, [row for layers in gaps for row in states(lane, layers)])
        self._ask(lane)

    def _enqueue(
        self, lane: Lane, blocks: Iterable[Block], known: Mapping[Block, list[Block]] = {}
    ) -> int:
        """Have blocks written; how many fragments of them wait for credits?

        ``known``: how some of them are cut. One that goes directly is asked for again, because
        its pages may not have been known before.
        """
        staged: list[Block] = []
        for block in blocks:
            fragments = known.get(block) or self._cut(lane, block)
            if fragments is None:
                lane.direct.append(block)
            else:
                staged += fragments
        if staged and not lane.awaits_credit:
            lane.waiting_since = self._now
        lane.staged.extend(staged)
        self._wake(lane)
        return len(staged)

    def _cut(self, lane: Lane, block: Block) -> list[Block] | None:
        return cut(lane, self.me.rank, block, self.stages, self.config.local_slot_bytes)

    def _ask(self, lane: Lane) -> None:
        """Ask for the credits that the lane needs, if they are more than it has asked for."""
        if lane.num_needed > lane.wanted:
            lane.wanted = lane.num_needed
            self._want(lane)

    def _want(self, lane: Lane) -> None:
        lane.said_at = self._now
        self._say(lane.link, Want(lane.room.name, lane.generation, lane.wanted))

    # ------------------------------------------------------------ writes

    def _settle(self) -> None:
        """Start what can be started, lanes in turn, then close what has been sent."""
        for lane in self._touched:
            self._post_held(lane)
        waiting: dict[Lane, None] = {}
        while self._ready and len(self.writing) < self.config.max_inflight:
            lane = next(iter(self._ready))
            del self._ready[lane]
            self._post_held(lane)
            if not self._may_write(lane):
                waiting[lane] = None
                continue
            if not self._writes_directly(lane) and not self.local_slots:
                self._starved[lane] = None
                self._take_back()
                continue
            self._start(lane)
            self._ready[lane] = None
        if waiting:
            self._gather_waiting(waiting)
        touched, self._touched = self._touched, {}
        for lane in touched:
            self._close_if_sent(lane)

    def _wake(self, lane: Lane) -> None:
        """Something changed for the lane: look at it when the step is over."""
        self._ready[lane] = None
        self._touched[lane] = None

    def _start(self, lane: Lane) -> None:
        """Start one write of the lane, with as much as waits and fits."""
        if self._writes_directly(lane):
            count = min(len(lane.direct), MAX_BLOCKS_PER_WRITE)
            some = [lane.direct.popleft() for _ in range(count)]
            self._write(lane, join_layers(lane.link.plan.spec, some))
        else:
            credit, blocks = self._use_credit(lane), self._fill_slot(lane, self._num_fitting(lane))
            self._write(lane, blocks, credit, self.local_slots.pop())

    def _use_credit(self, lane: Lane) -> Credit:
        serial = min(lane.credit)
        lane.used.add(serial)
        lane.waiting_since = self._now
        return Credit(serial, lane.credit.pop(serial))

    def _fill_slot(self, lane: Lane, count: int) -> tuple[Block, ...]:
        """So many of the fragments that wait, as one."""
        blocks = [lane.staged.popleft() for _ in range(count)]
        return join_layers(lane.link.plan.spec, blocks)

    def _num_fitting(self, lane: Lane) -> int:
        """How many of the fragments that wait fit one slot together. The first always does."""
        left_bytes = most_bytes = min(lane.slot_bytes, self.config.local_slot_bytes)
        about = lane.link.plan, self.me.rank, lane.peer.rank, lane.request
        for count, block in enumerate(islice(lane.staged, MAX_BLOCKS_PER_WRITE)):
            # Large requests are cut so that each fragment fills a slot: no second look, then.
            if count and left_bytes < most_bytes // 4:
                return count
            left_bytes -= image_bytes(*about, [block])
            if left_bytes < 0 and count:
                return count
        return min(len(lane.staged), MAX_BLOCKS_PER_WRITE)

    def _writes_directly(self, lane: Lane) -> bool:
        if not lane.direct:
            return False
        direct = sum(self.writing[op].local_slot is None for op in lane.inflight)
        return direct < MAX_DIRECT_PER_LANE

    def _is_able(self, lane: Lane) -> bool:
        running = lane.room.state in (RoomState.OPEN, RoomState.FINISHED)
        return running and lane.state is LaneState.SENDING and self._now >= lane.busy_until

    def _may_write(self, lane: Lane) -> bool:
        return self._is_able(lane) and (
            self._writes_directly(lane) or bool(lane.staged and lane.credit)
        )

    def _write(
        self,
        lane: Lane,
        blocks: tuple[Block, ...],
        credit: Credit | None = None,
        local_slot: SlotIndex | None = None,
    ) -> None:
        write = Writing(lane, blocks, credit, local_slot)
        self._do(
            Write(
                op=self._begin(write),
                peer=lane.peer,
                room=lane.room.name,
                generation=lane.generation,
                request=lane.request,
                blocks=blocks,
                tables=lane.tables,
                note=self._note_of(write),
                slot=credit.slot if credit else None,
                local_slot=local_slot,
            )
        )

    def _begin(self, write: Writing) -> Op:
        self._ops += 1
        op = Op(self._ops)
        write.lane.inflight.add(op)
        self.writing[op] = write
        return op

    def _note_of(self, write: Writing) -> Envelope:
        lane, credit = write.lane, write.credit
        about = lane.room.name, lane.generation, write.blocks
        arrived = Arrived(*about, credit.serial if credit else None)
        return self._envelope(lane.link.session, 0, arrived)

    # ------------------------------------------------------------ gathering ahead

    def _gather_waiting(self, lanes: dict[Lane, None]) -> None:
        """Let lanes gather ahead in turn, now that those with credits have what they need."""
        while lanes and len(self.writing) < self.config.max_inflight:
            lane = next(iter(lanes))
            del lanes[lane]
            if self._gather_ahead(lane):
                lanes[lane] = None
        self._ready |= lanes

    def _gather_ahead(self, lane: Lane) -> bool:
        """Fill a local slot with what waits for a credit, if enough are left for others."""
        if len(lane.held) >= self._ahead_slots or not self._is_able(lane):
            return False
        count = self._num_filling(lane)
        if not count:
            return False
        num_ahead = sum(write.is_ahead for write in self.writing.values())
        if not self.local_slots or num_ahead >= self._most_ahead:
            self._eager[lane] = None
            return False
        write = Writing(lane, self._fill_slot(lane, count), None, self.local_slots.pop())
        assert write.local_slot is not None
        op = self._begin(write)
        lane.held.append(op)
        about = lane.peer, lane.room.name, lane.request, write.blocks
        self._do(Gather(op, *about, lane.link.session, write.local_slot))
        return True

    def _num_filling(self, lane: Lane) -> int:
        """How many fragments fill a slot that nothing which is pushed later would share."""
        if not lane.staged:
            return 0
        count = self._num_fitting(lane)
        return count if lane.room.finish is not None or count < len(lane.staged) else 0

    def _post_held(self, lane: Lane) -> None:
        """Write what was gathered ahead, the oldest first, as far as there are credits."""
        while lane.held and lane.credit and self._is_able(lane):
            op = lane.held.popleft()
            write = self.writing[op]
            write.credit = self._use_credit(lane)
            self._do(Post(op, write.credit.slot, self._note_of(write)))
            self._wake_eager()

    def _take_back(self) -> None:
        """Somebody has a credit and no slot: whoever holds the only one without a credit waits."""
        if self.config.local_slots > 1:
            return  # Half of them are with writes, and those end.
        for op, write in self.writing.items():
            if op in write.lane.held:
                write.lane.held.remove(op)
                write.is_taken_back = True
                self._do(Discard(op))

    def _discard_held(self, lane: Lane) -> None:
        """Let go of what was gathered ahead. It stays in flight until that is answered."""
        for op in lane.held:
            self._do(Discard(op))
        lane.held.clear()

    def _wake_eager(self) -> None:
        self._ready |= self._eager
        self._eager.clear()

    # ------------------------------------------------------------ ends

    def is_followed(self, op: Op) -> bool:
        """Whether its lane goes on after that write, so that its end leads to no Close."""
        write = self.writing.get(op)
        return write is not None and write.credit is not None and write.lane.awaits_credit

    def _on_sent(self, event: Sent) -> None:
        write = self._end_write(event.op)
        if write is None:
            return
        lane = write.lane
        if write.credit is None:
            lane.written.extend(write.blocks)
        else:
            serial = write.credit.serial
            lane.notes[serial] = Arrived(lane.room.name, lane.generation, write.blocks, serial)
        self._drain(lane.room)

    def _end_write(self, op: Op) -> Writing | None:
        """A write reads our memory no longer; None if that was known already."""
        write = self.writing.pop(op, None)
        if write is None:
            self.counts["late"] += 1
            return None
        write.lane.inflight.discard(op)
        if op in write.lane.held:
            write.lane.held.remove(op)
        if write.local_slot is not None:
            self.local_slots.append(write.local_slot)
            self._ready |= self._starved
            self._starved.clear()
        self._wake_eager()
        self._wake(write.lane)
        return write

    def _on_send_failed(self, event: SendFailed) -> None:
        if event.fate is Fate.UNKNOWN:
            self._doubt(event.op)
            return
        write = self._end_write(event.op)
        if write is None:
            return
        if event.fate is Fate.BUSY:
            self._retry(write)
        else:
            text = f"a write to {write.lane.peer} failed"
            self._fail(write.lane.room, Failure.of(FailureCode.TRANSPORT, text))
        self._drain(write.lane.room)

    def _doubt(self, op: Op) -> None:
        """The write may go on. Only the end of the connection proves that it does not."""
        write = self.writing.get(op)
        if write:
            text = f"the fate of a write to {write.lane.peer} is unknown"
            self._fail(write.lane.room, Failure.of(FailureCode.TRANSPORT, text))
            self._lose(write.lane.link, FailureCode.TRANSPORT, text)

    def _retry(self, write: Writing) -> None:
        """Nothing was submitted. Back-pressure is not death: wait, and try again."""
        lane, credit = write.lane, write.credit
        if write.is_ahead:
            if lane.state is LaneState.SENDING and write.is_taken_back:
                lane.staged.extendleft(reversed(write.blocks))
            elif lane.state is LaneState.SENDING:
                # It was discarded because no credit came.
                lane.direct.extend(write.blocks)
            return
        self.counts["busy"] += 1
        if lane.state is not LaneState.SENDING:
            return
        lane.busy_until = self._now + self.config.resend_s / 4
        if credit is None:
            lane.direct.extendleft(reversed(write.blocks))
        else:
            lane.used.discard(credit.serial)
            lane.credit[credit.serial] = credit.slot
            lane.staged.extendleft(reversed(write.blocks))
