"""Tests of the cost model: presets by transport and device, and measured links."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvferry.ids import Session
from kvferry.memory.staging import slots_for
from kvferry.plan.cost import (
    GPU_SLOTS,
    HOST_SLOTS,
    MAX_IDLE_ROUTES,
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
def test_preset_has_the_slots_of_its_device(name: str, slots: SlotRule) -> None:
    preset = PRESETS[name]
    assert preset.slot_s == slots.slot_s
    assert preset.slot_bytes == slots_for(4096, rule=slots).slot_bytes


def test_default_slots_are_those_of_a_host() -> None:
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
def test_endpoint_starts_with_its_preset(transport: str, device: Device, preset: str) -> None:
    assert preset_for(transport, device) == preset
    assert default_link_cost(transport, device) == PRESETS[preset]


def test_endpoint_overrides_its_preset() -> None:
    found = default_link_cost("nixl", HOST, slot_bytes=4096, copy_bytes_per_s=1.5, maps_peer=True)
    assert found == replace(NIXL, slot_bytes=4096, copy_bytes_per_s=1.5, maps_peer=True)


def test_slots_follow_the_device_even_if_the_preset_does_not() -> None:
    found = default_link_cost("mooncake", Device("cuda"))
    slots = {"slot_bytes": GPU_SLOTS.slot_bytes(), "slot_s": GPU_SLOTS.slot_s}
    assert found == replace(PRESETS["mooncake"], **slots)


def test_nixl_descriptor_bytes_agree_with_its_preset() -> None:
    as_bytes = NIXL.descriptor_s * NIXL.bytes_per_s
    assert NIXL_DESCRIPTOR_BYTES <= as_bytes < 2 * NIXL_DESCRIPTOR_BYTES


def costs() -> LinkCostTable:
    return LinkCostTable({"shm": SHM, "nixl": NIXL})


def test_unmeasured_link_has_the_cost_of_its_preset() -> None:
    made = costs()
    assert made.of(ONE) == SHM
    made.add(ONE, "nixl", "10.0.0.1")
    made.add(TWO, "shm", "10.0.0.1")
    assert (made.of(ONE), made.of(TWO), made.latest) == (NIXL, SHM, SHM)


def test_links_share_measurements_by_host() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.add(session, "nixl", host)
    made.record(ONE, FAST)
    assert (made.of(ONE), made.of(TWO), made.of(THREE)) == (FAST, NIXL, FAST)
    made.record(TWO, SLOW)
    assert (made.of(ONE), made.of(TWO), made.latest) == (FAST, SLOW, SLOW)
    made.forget(TWO)
    made.record(TWO, FAST)
    assert made.latest == SLOW, "a link that is over was measured"
    made.add(TWO, "nixl", "far")
    assert made.of(TWO) == SLOW


def test_host_is_remeasured_after_an_interval() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.add(session, "nixl", host)
    assert [made.start_if_due(each, 100.0) for each in (ONE, TWO, THREE)] == [True, True, False]
    assert not made.start_if_due(ONE, 100.0 + REMEASURE_S - 1)
    assert made.start_if_due(THREE, 100.0 + REMEASURE_S)


def test_idle_routes_are_forgotten_beyond_a_limit() -> None:
    made = costs()
    for number in range(MAX_IDLE_ROUTES + 2):
        session = Session(2, number + 1)
        made.add(session, "nixl", f"host{number}")
        assert made.start_if_due(session, 0.0)
        made.record(session, FAST)
        made.forget(session)
    made.add(ONE, "nixl", "host0")
    assert made.of(ONE) == NIXL
    assert made.start_if_due(ONE, 1.0)
