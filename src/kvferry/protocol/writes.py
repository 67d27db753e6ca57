"""Credits and writes of a source: what may start now, and what an ended write means.

Lanes take turns. A lane waits for a credit, for a local slot, for one of the
writes in flight to end, or for a busy transport; it never holds one of these
while it waits for another, except a credit, which its pages already back.

What waits is written together: pushes of a few layers each cost as many writes as the
transport has time for, and no more.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, SlotIndex, Ticket
from kvferry.layout.intervals import Span
from kvferry.plan.plan import Block
from kvferry.protocol.ahead import Gatherer
from kvferry.protocol.cutting import cut_to_slots, join_layers
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.events import (
    Choose,
    Chosen,
    Event,
    Fate,
    Finish,
    Prepare,
    Push,
    SendFailed,
    Sent,
    Write,
)
from kvferry.protocol.lanes import (
    Lane,
    SourceRoom,
    Writing,
    chunk,
    num_expected,
    states,
)
from kvferry.protocol.messages import Arrived, Credit, Want
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.slots import MAX_BLOCKS_PER_WRITE
from kvferry.protocol.states import LaneState

# Direct writes of one lane at a time: one under way and one behind it. What is pushed
# meanwhile waits, and becomes one write.
MAX_DIRECT_PER_LANE = 2


@dataclass(slots=True, eq=False)
class Undecided:
    """Blocks of a lane whose transfer mode was asked for, by a push or ahead of one.

    ``cuts`` has the blocks that were decided before, and how they are cut.
    """

    lane: Lane
    event: Prepare | Push | Finish
    blocks: tuple[Block, ...]
    cuts: dict[Block, list[Block] | None]


class Writer(Gatherer):
    """The part of a source machine that starts and ends writes."""

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        super().__init__(identity, config)
        self.undecided: dict[Ticket, Undecided] = {}
        self._tickets = 0
        # Lanes that have a credit and wait for a local slot.
        self._starved: dict[Lane, None] = {}

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

    def _expect(self, lane: Lane, event: Prepare) -> None:
        """These tokens will be pushed: ask for the credits that they need."""
        if self._is_news(lane, event.tokens):
            self._decide(lane, event, chunk(lane, event.tokens, self._all_layers), {})

    def _is_news(self, lane: Lane, tokens: Span) -> bool:
        return tokens not in lane.expected and lane.room.lacks_of(lane, tokens)

    def _send(self, lane: Lane, push: Push) -> None:
        """Have written what a push means for a lane."""
        tokens, layers = push.tokens, self._layers_of(push)
        rows = states(lane, layers) if push.states else []
        known = lane.cuts.pop(tokens, {})
        self._decide(lane, push, [*chunk(lane, tokens, layers), *rows], known)

    def _send_rest(self, lane: Lane, finish: Finish) -> None:
        """All is pushed: state rows that did not go with their layers may be read too."""
        gaps = lane.room.rows.gaps(self._all_layers)
        self._decide(lane, finish, [row for layers in gaps for row in states(lane, layers)], {})

    # ------------------------------------------------------------ how it is written

    def _decide(
        self,
        lane: Lane,
        event: Prepare | Push | Finish,
        blocks: list[Block],
        known: dict[Block, list[Block]],
    ) -> None:
        """Ask how blocks are to be written.

        ``known``: how some of them are cut. One that goes directly is asked for again, because
        its pages may not have been known before.
        """
        cuts: dict[Block, list[Block] | None] = {b: known[b] for b in blocks if b in known}
        asked = Undecided(lane, event, tuple(b for b in blocks if b not in known), cuts)
        if not asked.blocks:
            self._decided(asked)
            return
        self._tickets += 1
        ticket = Ticket(self._tickets)
        self.undecided[ticket] = asked
        lane.undecided.add(ticket)
        self._do(Choose(ticket, lane.transfer, asked.blocks))

    def _on_chosen(self, event: Chosen) -> None:
        asked = self.undecided.pop(event.ticket, None)
        if asked is None:
            self.counts["late"] += 1
            return
        asked.lane.undecided.discard(event.ticket)
        for block, staged in zip(asked.blocks, event.staged, strict=True):
            asked.cuts[block] = self._cut(asked.lane, block) if staged else None
        self._decided(asked)

    def _decided(self, asked: Undecided) -> None:
        lane, event = asked.lane, asked.event
        if isinstance(event, Prepare):
            if self._is_news(lane, event.tokens):
                cuts = {block: cut for block, cut in asked.cuts.items() if cut is not None}
                lane.cuts[event.tokens] = cuts
                lane.expected[event.tokens] = sum(map(len, cuts.values()))
        else:
            num_staged = self._enqueue(lane, asked.cuts)
            if isinstance(event, Push):
                self._meet(lane, event, num_staged)
        self._wake(lane)
        self._ask(lane)

    def _meet(self, lane: Lane, push: Push, num_staged: int) -> None:
        """Ask at once for what the rest of a chunk will need."""
        tokens = push.tokens
        if push.layers is not None and not lane.expects(tokens):
            lane.expected[tokens] = num_expected(lane, tokens, push.layers, num_staged)
        else:
            lane.met(tokens, num_staged)
        for span in [span for span in lane.expected if not lane.room.lacks_of(lane, span)]:
            del lane.expected[span]

    def _drop_questions(self, lane: Lane) -> None:
        for ticket in lane.undecided:
            del self.undecided[ticket]
        lane.undecided.clear()

    def _enqueue(self, lane: Lane, cuts: dict[Block, list[Block] | None]) -> int:
        """Have blocks written; how many fragments of them wait for credits?"""
        staged: list[Block] = []
        for block, fragments in cuts.items():
            if fragments is None:
                lane.direct.append(block)
            else:
                staged += fragments
        if staged and not lane.awaits_credit:
            lane.waiting_since = self._now
        lane.staged.extend(staged)
        return len(staged)

    def _cut(self, lane: Lane, block: Block) -> list[Block] | None:
        """Fragments that each fit a slot of either side; None if a block is written directly."""
        if not lane.may_stage:
            return None
        slot_bytes = min(lane.slot_bytes, self.config.local_slot_bytes)
        return cut_to_slots(lane.link.plan, self.me.rank, lane.peer.rank, block, slot_bytes)

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

    def _start(self, lane: Lane) -> None:
        """Start one write of the lane, with as much as waits and fits."""
        if self._writes_directly(lane):
            count = min(len(lane.direct), MAX_BLOCKS_PER_WRITE)
            some = [lane.direct.popleft() for _ in range(count)]
            self._write(lane, join_layers(lane.link.plan.spec, some))
        else:
            credit, blocks = self._use_credit(lane), self._fill_slot(lane, self._num_fitting(lane))
            self._write(lane, blocks, credit, self.local_slots.pop())

    def _writes_directly(self, lane: Lane) -> bool:
        if not lane.direct:
            return False
        direct = sum(self.writing[op].local_slot is None for op in lane.inflight)
        return direct < MAX_DIRECT_PER_LANE

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
                transfer=lane.transfer,
                blocks=blocks,
                note=self._note_of(write),
                slot=credit.slot if credit else None,
                local_slot=local_slot,
            )
        )

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
