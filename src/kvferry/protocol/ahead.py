"""Gathering ahead: a lane fills local slots before it has credits for them.

Where gathering takes its time, a lane's next fragments go into local slots before it has credits
for them, and are only posted when these come. Such a write is in flight from its gather on, so
whatever waits for writes to end waits for it too. It holds a local slot while it waits for a
credit, and so half of the slots are never used for that: lanes with credits go on, whatever
becomes of a target. The only slot there is may be used for it, and is taken back.
"""

from __future__ import annotations

from kvferry.config import ProtocolConfig
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.events import Discard, Gather, Post
from kvferry.protocol.lanes import Lane, Writing
from kvferry.protocol.slots import SlotFiller


class Gatherer(SlotFiller):
    """The part of a source machine that gathers before credits come."""

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        super().__init__(identity, config)
        # Those that would gather ahead, if fewer did.
        self._eager: dict[Lane, None] = {}
        # Half of them, or else the only slot, which is taken back from who has no credit.
        only = config.local_slots == 1 < config.max_inflight
        self._most_ahead = 1 if only else min(config.local_slots, config.max_inflight) // 2
        self._ahead_slots = min(config.ahead_slots or 0, self._most_ahead)

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
        self._do(Gather(op, lane.transfer, write.blocks, write.local_slot))
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
