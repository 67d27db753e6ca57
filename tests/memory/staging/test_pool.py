"""Tests of how a budget is cut into slots, and of refused budgets."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.memory.staging import SlotPool, slots_for
from kvferry.plan.cost import GPU_SLOTS, HOST_SLOTS
from kvferry.plan.units import MIB
from kvferry.protocol.messages import MAX_SLOTS, Staging
from kvferry.regions import PAGE_BYTES

ENOUGH_SLOTS = HOST_SLOTS.enough


def test_the_default_depends_on_the_device() -> None:
    pool = slots_for(4096)
    assert pool == SlotPool(16 * MIB, ENOUGH_SLOTS)
    assert pool.num_bytes == 64 * MIB
    assert slots_for(4096, rule=GPU_SLOTS) == SlotPool(64 * MIB, 2)


def test_slots_are_contiguous() -> None:
    pool = SlotPool(8192, 3)
    assert [pool.offset(slot) for slot in range(3)] == [0, 8192, 16384]
    assert pool.num_bytes == 24576
    assert repr(pool) == "<SlotPool 3 x 8192 bytes>"
    for slot in (-1, 3):
        with pytest.raises(AssertionError, match="no slot"):
            pool.offset(slot)


def test_a_small_budget_is_still_cut_into_enough_slots() -> None:
    assert slots_for(4096, budget_bytes=MIB) == SlotPool(MIB // 4, 4)
    assert slots_for(4096, budget_bytes=3 * MIB, rule=GPU_SLOTS) == SlotPool(MIB + MIB // 2, 2)


@pytest.mark.parametrize(("budget_mib", "slot_mib"), [(60, 30), (512, 256), (4096, 256)])
def test_gpu_slots_grow_with_the_budget(budget_mib: int, slot_mib: int) -> None:
    pool = slots_for(4096, budget_bytes=budget_mib * MIB, rule=GPU_SLOTS)
    assert pool == SlotPool(slot_mib * MIB, budget_mib // slot_mib)


def test_a_large_unit_makes_the_slots_larger() -> None:
    assert slots_for(20 * MIB) == SlotPool(20 * MIB, 3)
    assert slots_for(20 * MIB + 1).slot_bytes == 20 * MIB + PAGE_BYTES


def test_number_of_slots_is_limited() -> None:
    assert slots_for(4096, most_slots=4) == SlotPool(16 * MIB, 4)


def test_largest_pool_fits_in_a_message() -> None:
    budget_bytes = (MAX_SLOTS + 1) * PAGE_BYTES
    pool = slots_for(1, budget_bytes=budget_bytes, slot_bytes=PAGE_BYTES)
    told = msgspec.msgpack.encode(Staging(*pool))
    assert msgspec.msgpack.decode(told, type=Staging).num_slots == MAX_SLOTS
    more = msgspec.msgpack.encode(Staging(PAGE_BYTES, MAX_SLOTS + 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(more, type=Staging)


@pytest.mark.parametrize(
    ("unit", "budget", "slot", "why"),
    [
        (4096, MIB, 2 * MIB, "hold no slot of 2097152 bytes; give staging more memory"),
        (2 * MIB, MIB, None, "hold no slot of 2097152 bytes"),
        (8192, MIB, 8191, "can't hold one token of one layer, which has 8192"),
        (0, MIB, None, "above 0"),
        (4096, 0, None, "above 0"),
        (4096, -5, None, "above 0"),
    ],
)
def test_useless_staging_is_refused(unit: int, budget: int, slot: int | None, why: str) -> None:
    with pytest.raises(InputError, match=why):
        slots_for(unit, budget_bytes=budget, slot_bytes=slot)


def test_a_pool_of_no_slots_is_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        slots_for(4096, most_slots=0)


@given(
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 34),
    st.none() | st.integers(1, 1 << 30),
    st.integers(1, 64),
)
def test_slots_fit_the_budget(unit: int, budget: int, slot: int | None, most: int) -> None:
    try:
        pool = slots_for(unit, budget_bytes=budget, slot_bytes=slot, most_slots=most)
    except InputError:
        assert slot is not None or unit > budget - PAGE_BYTES or budget < PAGE_BYTES
        return
    assert unit <= pool.slot_bytes
    assert pool.slot_bytes >= (slot or 0)
    assert pool.slot_bytes % PAGE_BYTES == 0
    assert pool.num_bytes <= budget
    assert 1 <= pool.num_slots <= most
    whole_unit = -(-unit // PAGE_BYTES) * PAGE_BYTES
    if slot is None and ENOUGH_SLOTS * whole_unit <= budget:
        assert pool.num_slots >= min(ENOUGH_SLOTS, most)
