"""The geometry of staging memory: equal slots, one after another."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.plan.cost import HOST_SLOTS, SlotRule
from kvferry.protocol.messages import MAX_SLOTS
from kvferry.regions import PAGE_BYTES


class SlotPool(NamedTuple):
    """``num_slots`` slots of ``slot_bytes`` each, from offset 0 of the staging memory on."""

    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Size of all slots together."""
        return self.slot_bytes * self.num_slots

    def offset(self, slot: int) -> int:
        """Return the offset of a slot."""
        assert 0 <= slot < self.num_slots, f"there is no slot {slot} in {self!r}"
        return slot * self.slot_bytes

    def __repr__(self) -> str:
        return f"<SlotPool {self.num_slots} x {self.slot_bytes} bytes>"


def slots_for(
    largest_unit_bytes: int,
    *,
    budget_bytes: int | None = None,
    slot_bytes: int | None = None,
    rule: SlotRule = HOST_SLOTS,
    most_slots: int = MAX_SLOTS,
) -> SlotPool:
    """Return the slots for a staging budget. Raises ``InputError`` if none fits.

    ``largest_unit_bytes`` is the size of one token, or state row, of one layer. Pushes are not cut
    smaller than that. ``rule`` gives the budget and the size of slots if they are None. Slots are
    aligned to pages of memory.
    """
    if budget_bytes is None:
        budget_bytes = rule.budget_bytes
    if min(largest_unit_bytes, budget_bytes, most_slots) <= 0:
        raise InputError("staging budget, largest unit and number of slots must be above 0")
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
