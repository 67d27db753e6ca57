"""The geometry of staging memory: equal slots, one after another. Offsets only."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.plan.cost import DEFAULT_BUDGET_BYTES, HOST_SLOTS, SlotRule
from kvferry.protocol.messages import MAX_SLOTS
from kvferry.regions import PAGE_BYTES


class SlotPool(NamedTuple):
    """``num_slots`` slots of ``slot_bytes``, from offset 0 of their memory on."""

    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """The memory that they take together."""
        return self.slot_bytes * self.num_slots

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        assert 0 <= slot < self.num_slots, f"there is no slot {slot} in {self!r}"
        return slot * self.slot_bytes

    def __repr__(self) -> str:
        return f"<SlotPool {self.num_slots} x {self.slot_bytes} bytes>"


def slots_for(
    largest_unit_bytes: int,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    slot_bytes: int | None = None,
    rule: SlotRule = HOST_SLOTS,
    most_slots: int = MAX_SLOTS,
) -> SlotPool:
    """Cut a budget into slots, or say why that would be useless.

    ``largest_unit_bytes`` is one token of one layer (or a state row of one layer) of
    what is to be staged: parcels are cut no smaller. Without ``slot_bytes``, ``rule`` gives
    the size. A slot begins at a page of memory.
    """
    if min(largest_unit_bytes, budget_bytes, most_slots) <= 0:
        raise InputError("a staging budget, what it must hold and the number of slots are above 0")
    if slot_bytes is None:
        slot_bytes = max(rule.slot_bytes(budget_bytes), largest_unit_bytes)
    if slot_bytes < largest_unit_bytes:
        raise InputError(
            f"a staging slot of {slot_bytes} bytes can't hold one token of one layer, which has "
            f"{largest_unit_bytes}; make slots at least that large, or use no staging"
        )
    whole = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
    if whole > budget_bytes:
        raise InputError(
            f"{budget_bytes} bytes of staging hold no slot of {whole} bytes; "
            f"give staging more memory, make slots smaller, or use no staging"
        )
    return SlotPool(whole, min(budget_bytes // whole, most_slots, MAX_SLOTS))
