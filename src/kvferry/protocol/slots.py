"""Local staging slots of a source, the writes in flight, and slots that are gathered early.

Where gathering takes its time, a outbound's next fragments go into local slots before it has
credits
for them, and are only posted when these come. Such a write is in flight from its gather on, so
whatever waits for writes to end waits for it too. It holds a local slot while it waits for a
credit, and so half of the slots are never used for that: outbounds with credits go on, whatever
becomes of a target. The only slot there is may be used for it, and is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, SlotIndex
from kvferry.protocol.events import Discard, Gather, Post
from kvferry.protocol.links import Links
from kvferry.protocol.outbound import ActiveWrite, OutboundTransfer
from kvferry.protocol.outbox import Outbox


class LocalSlots:
    """Free local slots, as a stack: the slot used last is the one still in a cache."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = [SlotIndex(i) for i in reversed(range(num_slots))]

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[SlotIndex]:
        return iter(self._free)

    def allocate(self) -> SlotIndex:
        """Return a free slot, which is then in use. There must be one."""
        return self._free.pop()

    def free(self, slot: SlotIndex) -> None:
        """Give a slot back: nothing reads or fills it any more."""
        self._free.append(slot)

    def check(self, in_use: list[SlotIndex]) -> None:
        """Every slot is free or in use, once."""
        everywhere = sorted([*self._free, *in_use])
        assert everywhere == list(range(self._num_slots)), "a local slot is lost or used twice"


class InFlight:
    """Writes that may read local memory, by number."""

    def __init__(self) -> None:
        self.writes: dict[Op, ActiveWrite] = {}
        self._ops = 0

    def begin(self, write: ActiveWrite) -> Op:
        """Give a write its number."""
        self._ops += 1
        op = Op(self._ops)
        write.outbound.inflight.add(op)
        self.writes[op] = write
        return op

    def end(self, op: Op) -> ActiveWrite | None:
        """A write reads our memory no longer; None if that was known already."""
        write = self.writes.pop(op, None)
        if write is not None:
            write.outbound.inflight.discard(op)
            if op in write.outbound.held:
                write.outbound.held.remove(op)
        return write

    def slots(self) -> list[SlotIndex]:
        """Return the local slots that writes in flight use."""
        used = (write.local_slot for write in self.writes.values())
        return [slot for slot in used if slot is not None]

    def check(self) -> None:
        """Every write is in flight on its own outbound, and what is held was never granted."""
        for op, write in self.writes.items():
            assert op in write.outbound.inflight, op
            assert write.is_ahead or op not in write.outbound.held, op


class EarlyGather:
    """Slots that are gathered before credits come."""

    def __init__(
        self,
        config: ProtocolConfig,
        links: Links,
        outbox: Outbox,
        slots: LocalSlots,
        inflight: InFlight,
    ) -> None:
        self._config = config
        self._links = links
        self._outbox = outbox
        self.slots = slots
        self.inflight = inflight
        # Lanes that would gather ahead, if fewer did.
        self._eager: dict[OutboundTransfer, None] = {}
        # Half of them, or else the only slot, which a outbound without a credit must give back.
        only = config.local_slots == 1 < config.max_inflight
        self._most_ahead = 1 if only else min(config.local_slots, config.max_inflight) // 2
        self._ahead_slots = min(config.early_gather_slots or 0, self._most_ahead)
        self.is_on = self._ahead_slots > 0

    def gather_in_turn(
        self, outbounds: dict[OutboundTransfer, None]
    ) -> dict[OutboundTransfer, None]:
        """Let outbounds gather ahead in turn; return those that another write may still help."""
        while outbounds and len(self.inflight.writes) < self._config.max_inflight:
            outbound = next(iter(outbounds))
            del outbounds[outbound]
            if self._gather(outbound):
                outbounds[outbound] = None
        return outbounds

    def _gather(self, outbound: OutboundTransfer) -> bool:
        """Fill a local slot with what waits for a credit, if enough are left for others."""
        if len(outbound.held) >= self._ahead_slots or not outbound.is_able(self._outbox.now):
            return False
        count = self._num_filling(outbound)
        if not count:
            return False
        num_ahead = sum(write.is_ahead for write in self.inflight.writes.values())
        if not self.slots or num_ahead >= self._most_ahead:
            self._eager[outbound] = None
            return False
        slot = self.slots.allocate()
        write = ActiveWrite(outbound, outbound.fill(count), None, slot)
        op = self.inflight.begin(write)
        outbound.held.append(op)
        self._outbox.do(Gather(op, outbound.transfer, write.blocks, slot))
        return True

    def _num_filling(self, outbound: OutboundTransfer) -> int:
        """How many fragments fill a slot that nothing which is pushed later would share."""
        if not outbound.staged:
            return 0
        count = outbound.num_fitting(self._config.local_slot_bytes)
        return count if outbound.room.finish is not None or count < len(outbound.staged) else 0

    def post(self, outbound: OutboundTransfer) -> bool:
        """Write what was gathered ahead, the oldest first, as far as there are credits."""
        posted = False
        while outbound.held and outbound.credit and outbound.is_able(self._outbox.now):
            op = outbound.held.popleft()
            write = self.inflight.writes[op]
            write.credit = outbound.use_credit(self._outbox.now)
            note = self._links.envelope(outbound.link.session, 0, write.note())
            self._outbox.do(Post(op, write.credit.slot, note))
            posted = True
        return posted

    def take_back(self) -> None:
        """Take back the only slot for a transfer with a credit; its holder has none and waits."""
        if self._config.local_slots > 1:
            return  # Half of them are with writes, and those end.
        for op, write in self.inflight.writes.items():
            if op in write.outbound.held:
                write.outbound.held.remove(op)
                write.is_taken_back = True
                self._outbox.do(Discard(op))

    def discard(self, outbound: OutboundTransfer) -> None:
        """Let go of what was gathered ahead. It stays in flight until that is answered."""
        for op in outbound.held:
            self._outbox.do(Discard(op))
        outbound.held.clear()

    def eager(self) -> dict[OutboundTransfer, None]:
        """Return the transfers that may gather early now; none of them waits after this."""
        outbounds, self._eager = self._eager, {}
        return outbounds

    def check(self) -> None:
        """No more slots wait for credits than may."""
        num_ahead = sum(write.is_ahead for write in self.inflight.writes.values())
        assert num_ahead <= max(1, self._most_ahead), num_ahead
