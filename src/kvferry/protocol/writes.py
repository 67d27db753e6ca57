"""Credits and writes of a source: what may start now, and what an ended write means.

Lanes take turns. A lane waits for a credit, for a local slot, for one of the
writes in flight to end, or for a busy transport; it never holds one of these
while it waits for another, except a credit, which its pages already back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, SlotIndex
from kvferry.plan.plan import Block
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.events import Event, Fate, SendFailed, Sent, Write
from kvferry.protocol.handshake import Welcomer
from kvferry.protocol.lanes import Lane, SourceRoom, StagePolicy, Writing, cut
from kvferry.protocol.messages import Arrived, Credit, Want
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LaneState, RoomState

# Blocks in one write. More go into the next one.
MAX_BLOCKS_PER_WRITE = 256


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

    def _enqueue(self, lane: Lane, blocks: Iterable[Block], key: Hashable) -> None:
        direct, staged = self._cut(lane, blocks)
        lane.direct.extend(direct)
        if staged and not lane.staged:
            lane.waiting_since = self._now
        lane.staged.extend(staged)
        self._ask(lane, key, len(staged))
        self._wake(lane)

    def _cut(self, lane: Lane, blocks: Iterable[Block]) -> tuple[list[Block], list[Block]]:
        return cut(lane, self.me.rank, blocks, self.stages, self.config.local_slot_bytes)

    def _ask(self, lane: Lane, key: Hashable, num_credits: int) -> None:
        """Ask for credits, once for each part of the request."""
        if num_credits and key not in lane.asked:
            lane.asked[key] = num_credits
            self._want(lane)

    def _want(self, lane: Lane) -> None:
        lane.said_at = self._now
        self._say(lane.link, Want(lane.room.name, lane.generation, lane.num_wanted))

    def _settle(self) -> None:
        """Start what can be started, lanes in turn, then close what has been sent."""
        while self._ready and len(self.writing) < self.config.max_inflight:
            lane = next(iter(self._ready))
            del self._ready[lane]
            if not self._may_write(lane):
                continue
            if not lane.direct and not self.local_slots:
                self._starved[lane] = None
                continue
            self._start(lane)
            self._ready[lane] = None
        touched, self._touched = self._touched, {}
        for lane in touched:
            self._close_if_sent(lane)

    def _wake(self, lane: Lane) -> None:
        """Something changed for the lane: look at it when the step is over."""
        self._ready[lane] = None
        self._touched[lane] = None

    def _start(self, lane: Lane) -> None:
        """Start one write of the lane."""
        if lane.direct:
            count = min(len(lane.direct), MAX_BLOCKS_PER_WRITE)
            self._write(lane, tuple(lane.direct.popleft() for _ in range(count)))
        else:
            serial = min(lane.credit)
            lane.used.add(serial)
            lane.waiting_since = self._now
            credit = Credit(serial, lane.credit.pop(serial))
            self._write(lane, (lane.staged.popleft(),), credit, self.local_slots.pop())

    def _may_write(self, lane: Lane) -> bool:
        running = lane.room.state in (RoomState.OPEN, RoomState.FINISHED)
        able = lane.state is LaneState.SENDING and self._now >= lane.busy_until
        return running and able and bool(lane.direct or (lane.staged and lane.credit))

    def _write(
        self,
        lane: Lane,
        blocks: tuple[Block, ...],
        credit: Credit | None = None,
        local_slot: SlotIndex | None = None,
    ) -> None:
        self._ops += 1
        op = Op(self._ops)
        lane.inflight.add(op)
        self.writing[op] = Writing(lane, blocks, credit, local_slot)
        note = Arrived(lane.room.name, lane.generation, blocks, credit.serial if credit else None)
        self._do(
            Write(
                op=op,
                peer=lane.peer,
                room=lane.room.name,
                generation=lane.generation,
                request=lane.request,
                blocks=blocks,
                tables=lane.tables,
                note=self._envelope(lane.link.session, 0, note),
                slot=credit.slot if credit else None,
                local_slot=local_slot,
            )
        )

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
        if write.local_slot is not None:
            self.local_slots.append(write.local_slot)
            self._ready |= self._starved
            self._starved.clear()
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
