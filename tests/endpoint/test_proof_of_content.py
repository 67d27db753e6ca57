"""Damaged content is refused before it is used, over every transport and between any layouts."""

from __future__ import annotations

import pytest
from endpoint.fleets import layout
from msgspec.structs import replace

from kvferry.endpoint.config import EndpointConfig, ProofMode
from kvferry.layout.layout import Layout, Order
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    StateRow,
    Tensor,
    attention_group,
)
from kvferry.plan.choose import TransferMode
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.testing.faulty_transport import ContentFault
from kvferry.testing.fleet import Fleet, FleetSide

PROVEN = EndpointConfig(proof=ProofMode.FULL)
DIRECT = replace(PROVEN, mode=TransferMode.SLICES)
STAGED = replace(PROVEN, mode=TransferMode.STAGED, slot_bytes=4096, staging_bytes=16384)
NUM_TOKENS = 75
# Two layers of attention and one of recurrent state in each of two pipeline stages.
HYBRID = CacheSpec(
    num_layers=6,
    groups=(
        attention_group("full", Paged(), (0, 1, 3, 4), 4, 16, None, DType.BFLOAT16),
        Group("conv", StateRow(), (2, 5), 8, (Tensor("state", DType.FLOAT32, 3),)),
        Group("ssm", StateRow(), (2, 5), 4, (Tensor("state", DType.FLOAT32, 33),)),
    ),
)
CASES = {
    "tp4-tp1": (layout(HYBRID, tp=4), layout(HYBRID, 8, tp=1)),
    "page16-page64": (layout(HYBRID, 16, tp=1), layout(HYBRID, 64, Order.HND, tp=1)),
    "pp2-tp2": (layout(HYBRID, 8, pp=2, tp=1), layout(HYBRID, 4, tp=2)),
    "cp2-tp2": (layout(HYBRID, 4, cp=2), layout(HYBRID, 8, tp=2)),
}
TRANSPORTS = ("shm", "nixl", "mooncake")


def started(
    case: tuple[Layout, Layout],
    transport: str,
    fault: ContentFault | None,
    config: EndpointConfig = DIRECT,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> Fleet:
    (source, target), (ours, theirs) = case, devices
    prefill = FleetSide("prefill", source, 40, config, fault=fault, device=ours)
    decode = FleetSide("decode", target, 40, config, device=theirs)
    return Fleet(prefill, decode, transport=transport)


def refused(fleet: Fleet) -> list[Failure]:
    """Carry a room with wrong content, and return how it failed at the targets."""
    targets = fleet.targets["decode"]
    fleet.fill("r", 7, NUM_TOKENS)
    fleet.receive("r", "decode", Request(NUM_TOKENS))
    fleet.send("r", NUM_TOKENS)
    outcomes = fleet.outcomes("r", targets)
    problems = fleet.all(targets, "problem", "r", 7, Request(NUM_TOKENS))
    assert any(problems)
    # A source whose room has failed at one target may fail it at others.
    for outcome, problem in zip(outcomes, problems, strict=True):
        assert not (isinstance(outcome, Done) and problem)
    fleet.all(fleet.ranks, "wait_released", "r", 10.0)
    assert not any("rooms" in tables for tables in fleet.leftovers().values())
    return [outcome for outcome in outcomes if isinstance(outcome, Failure)]


# Every fault between all layouts over shm, and over each network between every other pair of them.
FAULTS = [
    (fault, case, transport)
    for i, fault in enumerate(ContentFault)
    for j, case in enumerate(CASES)
    for transport in TRANSPORTS
    if transport == "shm" or (i + j) % 2 == (transport == "nixl")
]
CPUS, GPUS, MIXED = ("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")
# The same with pools on a GPU: every fault over cuda, and half of them over NIXL.
GPU_FAULTS = [
    pytest.param(fault, case, transport, GPUS, marks=pytest.mark.gpu)
    for i, fault in enumerate(ContentFault)
    for j, case in enumerate(CASES)
    for transport in ("cuda", "nixl")
    if transport == "cuda" or (i + j) % 2
]


@pytest.mark.parametrize(
    ("fault", "case", "transport", "devices"), [*((*each, CPUS) for each in FAULTS), *GPU_FAULTS]
)
def test_a_fault_is_refused(
    fault: ContentFault, case: str, transport: str, devices: tuple[str, str]
) -> None:
    with started(CASES[case], transport, fault, devices=devices) as fleet:
        failures = refused(fleet)
        assert sum(fleet.all(fleet.sources, "num_faults")) > 0
    assert failures
    assert {failure.code for failure in failures} == {FailureCode.CONTENT_CORRUPT}
    assert all("what has arrived is not what prefill/" in one.message for one in failures)


@pytest.mark.parametrize(
    ("transport", "devices"),
    [
        ("nixl", CPUS),
        ("mooncake", CPUS),
        *(pytest.param("nixl", where, marks=pytest.mark.gpu) for where in (GPUS, MIXED)),
    ],
)
@pytest.mark.parametrize("fault", [one for one in ContentFault if not one.needs_pieces])
def test_a_fault_in_a_staged_write_is_refused(
    fault: ContentFault, transport: str, devices: tuple[str, str]
) -> None:
    with started(CASES["tp4-tp1"], transport, fault, STAGED, devices) as fleet:
        assert {failure.code for failure in refused(fleet)} == {FailureCode.CONTENT_CORRUPT}


@pytest.mark.parametrize(
    ("transport", "devices"),
    [
        *((transport, CPUS) for transport in TRANSPORTS),
        *(
            pytest.param(transport, devices, marks=pytest.mark.gpu)
            for transport, devices in (("cuda", GPUS), ("nixl", GPUS), ("nixl", MIXED))
        ),
    ],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("config", [DIRECT, STAGED], ids=["direct", "staged"])
def test_right_content_is_done(
    config: EndpointConfig, case: tuple[Layout, Layout], transport: str, devices: tuple[str, str]
) -> None:
    with started(case, transport, None, config, devices) as fleet:
        for number, prefix in enumerate((0, 21, NUM_TOKENS)):
            fleet.carry(f"r{number}", Request(NUM_TOKENS, prefix), seed=number)
        assert fleet.leftovers() == {}


def test_without_a_proof_a_fault_is_not_seen() -> None:
    config = EndpointConfig(proof=ProofMode.OFF)
    with started(CASES["tp4-tp1"], "shm", ContentFault.FLIP_BYTE, config) as fleet:
        fleet.fill("r", 7, NUM_TOKENS)
        fleet.receive("r", "decode", Request(NUM_TOKENS))
        fleet.send("r", NUM_TOKENS)
        targets = fleet.targets["decode"]
        fleet.demand_done("r", targets, 10.0)
        assert all(fleet.all(targets, "problem", "r", 7, Request(NUM_TOKENS)))
