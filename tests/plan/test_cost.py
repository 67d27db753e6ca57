"""The cost model: presets by transport and device, and what each link is measured to cost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvferry.ids import Session
from kvferry.memory.staging import slots_for
from kvferry.plan.cost import (
    GPU_SLOTS,
    HOST_SLOTS,
    MAX_PLACES,
    NIXL_DESCRIPTOR_BYTES,
    PRESETS,
    REMEASURE_S,
    LinkCost,
    LinkCostTable,
    SlotRule,
    default_link_cost,
    preset_for,
)
from kvferry.regions import HOST, Device

SHM, NIXL = PRESETS["shm"], PRESETS["nixl-host"]
FAST, SLOW = replace(NIXL, bytes_per_s=9e9), replace(NIXL, bytes_per_s=1e9)
ONE, TWO, THREE = (Session(1, n) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("nixl-host", HOST_SLOTS),
        ("mooncake", HOST_SLOTS),
        ("shm", HOST_SLOTS),
        ("nixl-gpu", GPU_SLOTS),
        ("cuda", GPU_SLOTS),
        ("rdma-400g", GPU_SLOTS),
    ],
)
def test_a_preset_has_the_slots_of_its_device(name: str, slots: SlotRule) -> None:
    preset = PRESETS[name]
    assert preset.slot_s == slots.slot_s
    assert preset.slot_bytes == slots_for(4096, rule=slots).slot_bytes


def test_constants_without_slots_have_those_of_a_host() -> None:
    plain = LinkCost(descriptor_s=0, bytes_per_s=1, copy_bytes_per_s=1)
    assert (plain.slot_s, plain.slot_bytes) == (NIXL.slot_s, NIXL.slot_bytes)


@pytest.mark.parametrize(
    ("transport", "device", "preset"),
    [
        ("nixl", HOST, "nixl-host"),
        ("nixl", Device("cuda", 3), "nixl-gpu"),
        ("shm", HOST, "shm"),
        ("cuda", Device("cuda"), "cuda"),
        ("mooncake", HOST, "mooncake"),
        ("somebodys", HOST, "nixl-host"),
        ("somebodys", Device("cuda"), "nixl-gpu"),
    ],
)
def test_an_endpoint_starts_with_its_preset(transport: str, device: Device, preset: str) -> None:
    assert preset_for(transport, device) == preset
    assert default_link_cost(transport, device) == PRESETS[preset]


def test_an_endpoint_knows_better_than_its_preset() -> None:
    found = default_link_cost("nixl", HOST, slot_bytes=4096, copy_bytes_per_s=1.5, maps_peer=True)
    assert found == replace(NIXL, slot_bytes=4096, copy_bytes_per_s=1.5, maps_peer=True)


def test_slots_are_those_of_the_device_also_where_a_preset_is_not() -> None:
    found = default_link_cost("mooncake", Device("cuda"))
    slots = {"slot_bytes": GPU_SLOTS.slot_bytes(), "slot_s": GPU_SLOTS.slot_s}
    assert found == replace(PRESETS["mooncake"], **slots)


def test_nixls_batches_weigh_a_descriptor_as_its_preset_does() -> None:
    as_bytes = NIXL.descriptor_s * NIXL.bytes_per_s
    assert NIXL_DESCRIPTOR_BYTES <= as_bytes < 2 * NIXL_DESCRIPTOR_BYTES


def costs() -> LinkCostTable:
    return LinkCostTable({"shm": SHM, "nixl": NIXL})


def test_before_it_is_measured_a_link_costs_what_its_transport_is_known_for() -> None:
    made = costs()
    assert made.of(ONE) == SHM
    made.reached(ONE, "nixl", "10.0.0.1")
    made.reached(TWO, "shm", "10.0.0.1")
    assert (made.of(ONE), made.of(TWO), made.latest) == (NIXL, SHM, SHM)


def test_links_to_one_host_cost_the_same_and_to_another_something_else() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.reached(session, "nixl", host)
    made.measured(ONE, FAST)
    assert (made.of(ONE), made.of(TWO), made.of(THREE)) == (FAST, NIXL, FAST)
    made.measured(TWO, SLOW)
    assert (made.of(ONE), made.of(TWO), made.latest) == (FAST, SLOW, SLOW)
    made.forget(TWO)
    made.measured(TWO, FAST)
    assert made.latest == SLOW, "a link that is over was measured"
    made.reached(TWO, "nixl", "far")
    assert made.of(TWO) == SLOW


def test_a_host_is_measured_now_and_then() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.reached(session, "nixl", host)
    assert [made.due(each, 100.0) for each in (ONE, TWO, THREE)] == [True, True, False]
    assert not made.due(ONE, 100.0 + REMEASURE_S - 1)
    assert made.due(THREE, 100.0 + REMEASURE_S)


def test_hosts_that_nobody_is_on_are_forgotten_when_they_are_many() -> None:
    made = costs()
    for number in range(MAX_PLACES + 2):
        session = Session(2, number + 1)
        made.reached(session, "nixl", f"host{number}")
        assert made.due(session, 0.0)
        made.measured(session, FAST)
        made.forget(session)
    made.reached(ONE, "nixl", "host0")
    assert made.of(ONE) == NIXL
    assert made.due(ONE, 1.0)
