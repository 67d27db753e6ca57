"""Local staging slots of a source, its writes in flight, and early gathers.

An early gather copies the next fragments into a local slot before the transfer has a credit for
them. The write is posted when the credit arrives. It counts as in flight from the gather on, so
everything that waits for writes to end waits for it, too.

An early gather holds its local slot while it waits for a credit. It may use at most half of the
slots, so that transfers with credits proceed whatever happens to its target. If there is only one
slot, an early gather may use it, but must return it to a transfer with a credit.
"""

from __future__ import annotations

from kvferry.ids import Op, SlotIndex
from kvferry.protocol.events import Discard, Gather, Outbox, Post
from kvferry.protocol.links import Links
from kvferry.protocol.outbound import ActiveWrite, OutboundTransfer


class LocalSlots:
    """Free local slots, as a stack: the slot used last is the most likely one to be cached."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = [SlotIndex(i) for i in reversed(range(num_slots))]

    def __len__(self) -> int:
        return len(self._free)

    def allocate(self) -> SlotIndex:
        """Take a free slot, which must exist."""
        return self._free.pop()

    def free(self, slot: SlotIndex) -> None:
        """Return a slot that nothing reads or fills any more."""
        self._free.append(slot)

    def check(self, in_use: list[SlotIndex]) -> None:
        """Check that every slot is either free or in use, once."""
        slots = sorted([*self._free, *in_use])
        assert slots == list(range(self._num_slots)), "a local slot is lost or used twice"


class InFlight:
    """Writes that may read local memory, by number, and the local slots that they read."""

    def __init__(self, slots: LocalSlots) -> None:
        self.slots = slots
        self.writes: dict[Op, ActiveWrite] = {}
        self._ops = 0

    def begin(self, write: ActiveWrite) -> Op:
        """Add a write and return its number."""
        self._ops += 1
        op = Op(self._ops)
        write.outbound.inflight.add(op)
        self.writes[op] = write
        return op

    def end(self, op: Op) -> ActiveWrite | None:
        """Remove and return a write that has ended; None if it was removed before."""
        write = self.writes.pop(op, None)
        if write is not None:
            write.outbound.inflight.discard(op)
            if op in write.outbound.held:
                write.outbound.held.remove(op)
            if write.local_slot is not None:
                self.slots.free(write.local_slot)
        return write

    @property
    def num_early(self) -> int:
        """Number of early gathers without a credit."""
        return sum(write.is_ahead for write in self.writes.values())

    def check(self) -> None:
        """Check that each write is known to its transfer, and no held gather has a credit."""
        for op, write in self.writes.items():
            assert op in write.outbound.inflight, op
            assert write.is_ahead or op not in write.outbound.held, op
        used = (write.local_slot for write in self.writes.values())
        self.slots.check([slot for slot in used if slot is not None])


class EarlyGather:
    """Gathers into local slots before credits arrive."""

    def __init__(self, links: Links, outbox: Outbox, inflight: InFlight) -> None:
        self._config = config = links.config
        self._links = links
        self._outbox = outbox
        self.inflight = inflight
        # Transfers that found too many early gathers in flight.
        self._waiting: dict[OutboundTransfer, None] = {}
        shares_only_slot = config.local_slots == 1 < config.max_inflight
        half = min(config.local_slots, config.max_inflight) // 2
        self._max_early = 1 if shares_only_slot else half
        self._max_per_transfer = min(config.early_gather_slots or 0, self._max_early)
        self.is_on = self._max_per_transfer > 0

    def gather_in_turn(
        self, outbounds: dict[OutboundTransfer, None]
    ) -> dict[OutboundTransfer, None]:
        """Gather for ``outbounds`` round-robin; return those left when too much is in flight."""
        while outbounds and len(self.inflight.writes) < self._config.max_inflight:
            outbound = next(iter(outbounds))
            del outbounds[outbound]
            if self._gather(outbound):
                outbounds[outbound] = None
        return outbounds

    def _gather(self, outbound: OutboundTransfer) -> bool:
        """Start one early gather if the limits allow it."""
        full = len(outbound.held) >= self._max_per_transfer
        if full or not outbound.staged or not outbound.can_write(self._outbox.now):
            return False
        count = outbound.num_fitting(self._config.local_slot_bytes)
        if outbound.room.finish is None and count == len(outbound.staged):
            return False  # A later push may share the slot.
        if not self.inflight.slots or self.inflight.num_early >= self._max_early:
            self._waiting[outbound] = None
            return False
        slot = self.inflight.slots.allocate()
        write = ActiveWrite(outbound, outbound.take_staged(count), None, slot)
        op = self.inflight.begin(write)
        outbound.held.append(op)
        self._outbox.do(Gather(op, outbound.transfer, write.blocks, slot))
        return True

    def post(self, outbound: OutboundTransfer) -> bool:
        """Post gathered slots, oldest first, as far as there are credits."""
        posted = False
        while outbound.held and outbound.credit and outbound.can_write(self._outbox.now):
            op = outbound.held.popleft()
            write = self.inflight.writes[op]
            write.credit = outbound.use_credit(self._outbox.now)
            note = self._links.envelope(outbound.link.session, 0, write.note())
            self._outbox.do(Post(op, write.credit.slot, note))
            posted = True
        return posted

    def reclaim(self) -> None:
        """Reclaim the only slot from an early gather, for a transfer with a credit."""
        if self._config.local_slots > 1:
            return  # Half of the slots are never used early, and their writes end.
        for op, write in self.inflight.writes.items():
            if op in write.outbound.held:
                write.outbound.held.remove(op)
                write.is_reclaimed = True
                self._outbox.do(Discard(op))

    def discard(self, outbound: OutboundTransfer) -> None:
        """Discard a transfer's early gathers. They stay in flight until that is answered."""
        for op in outbound.held:
            self._outbox.do(Discard(op))
        outbound.held.clear()

    def pop_waiting(self) -> dict[OutboundTransfer, None]:
        """Return the transfers that wait to gather early, and clear the list."""
        outbounds, self._waiting = self._waiting, {}
        return outbounds

    def check(self) -> None:
        """Check the limit on early gathers."""
        assert self.inflight.num_early <= max(1, self._max_early), self.inflight.num_early
