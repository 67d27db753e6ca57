"""Local staging slots of a source, and the writes that are in flight."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.ids import Op, SlotIndex
from kvferry.protocol.lanes import Writing


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
        self.writes: dict[Op, Writing] = {}
        self._ops = 0

    def __len__(self) -> int:
        return len(self.writes)

    def begin(self, write: Writing) -> Op:
        """Give a write its number."""
        self._ops += 1
        op = Op(self._ops)
        write.lane.inflight.add(op)
        self.writes[op] = write
        return op

    def end(self, op: Op) -> Writing | None:
        """A write reads our memory no longer; None if that was known already."""
        write = self.writes.pop(op, None)
        if write is not None:
            write.lane.inflight.discard(op)
            if op in write.lane.held:
                write.lane.held.remove(op)
        return write

    def slots(self) -> list[SlotIndex]:
        """Return the local slots that writes in flight use."""
        used = (write.local_slot for write in self.writes.values())
        return [slot for slot in used if slot is not None]

    def check(self) -> None:
        """Every write is in flight on its own lane, and what is held was never granted."""
        for op, write in self.writes.items():
            assert op in write.lane.inflight, op
            assert write.is_ahead or op not in write.lane.held, op
