"""Local slots of a source, and what each of its writes takes: fragments, a credit, a number."""

from __future__ import annotations

from itertools import islice

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, SlotIndex
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import image_bytes, join_layers
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.handshake import Welcomer
from kvferry.protocol.lanes import Lane, Writing
from kvferry.protocol.messages import Arrived, Credit, Envelope
from kvferry.protocol.states import LaneState, RoomState

# Blocks in one write. More go into the next one.
MAX_BLOCKS_PER_WRITE = 256


class SlotFiller(Welcomer):
    """The part of a source machine that has its slots, and the writes that are under way."""

    def __init__(self, identity: Identity, config: ProtocolConfig) -> None:
        super().__init__(identity, config)
        self.writing: dict[Op, Writing] = {}
        # A stack: the slot that was used last is the one that is still in a cache.
        self.local_slots = [SlotIndex(i) for i in reversed(range(config.local_slots))]
        # Ordered sets: lanes that may have something to write, and those that this step has
        # changed.
        self._ready: dict[Lane, None] = {}
        self._touched: dict[Lane, None] = {}
        self._ops = 0

    def _wake(self, lane: Lane) -> None:
        """Something changed for the lane: look at it when the step is over."""
        self._ready[lane] = None
        self._touched[lane] = None

    def _is_able(self, lane: Lane) -> bool:
        running = lane.room.state in (RoomState.OPEN, RoomState.FINISHED)
        return running and lane.state is LaneState.SENDING and self._now >= lane.busy_until

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
