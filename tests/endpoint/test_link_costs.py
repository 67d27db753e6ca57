"""Calibration: costs from timed writes, and the modes chosen with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvferry.endpoint.link_costs import (
    FEW_PIECES,
    NUM_PIECES,
    STEPS,
    Calibration,
)
from kvferry.endpoint.setup import GPU_SCRATCH_BYTES, SCRATCH_BYTES
from kvferry.plan.bind import Binding
from kvferry.plan.choose import BlockShape, TransferMode, choose
from kvferry.plan.cost import PRESETS, LinkCost
from kvferry.plan.places import Base

KIB, MIB = 1 << 10, 1 << 20
BASES = Base(0, 1, 0), Base(0, 2, 4096)
# Qwen3-32B, 8192 tokens in pages of 64, nothing adjacent: K and V of 64 layers.
EQUAL = BlockShape(2048 * MIB, 64 * 2 * 128, 64 * 2 * 128, contiguous=True)
# The same from TP4 to TP1: a piece for each token.
UNEQUAL = BlockShape(512 * MIB, 64 * 2 * 8192, 64 * 2 * 8192, contiguous=False)


def calibrated(
    seconds: Callable[[Binding], float], before: LinkCost, num_bytes: int = SCRATCH_BYTES
) -> LinkCost:
    """Calibrate a link on which a write takes ``seconds``, as the transport thread does."""
    calibration = Calibration(*BASES, num_bytes)
    sizes = []
    while (binding := calibration.next()) is not None:
        sizes.append((binding.num_bytes, binding.num_pieces))
        # The first write connects, and does not count.
        calibration.record(seconds(binding) if len(sizes) > 1 else 1.0)
    small = [(n * KIB, n) for n in (FEW_PIECES, NUM_PIECES)]
    rounds = [(num_bytes, 1), (128 * KIB, 1), *small, (FEW_PIECES * 64 * KIB, FEW_PIECES)]
    assert sizes == [(num_bytes, 1), *rounds * 4]
    assert len(sizes) == len(STEPS)
    return calibration.link_cost(before)


def link(
    write_s: float, bytes_per_s: float, small_s: float, large_s: float
) -> Callable[[Binding], float]:
    def seconds(binding: Binding) -> float:
        pieces = binding.num_pieces
        each = small_s if binding.num_bytes // pieces <= KIB else large_s
        # Listing descriptors has a fixed cost.
        more = 1e-4 + pieces * each if pieces > 1 else 0.0
        return write_s + more + binding.num_bytes / bytes_per_s

    return seconds


def test_each_cost_is_recovered() -> None:
    before = PRESETS["nixl-host"]
    found = calibrated(link(20e-6, 6e9, 3e-6, 2e-6), before)
    assert found.bytes_per_s == pytest.approx(6e9)
    assert found.write_s == pytest.approx(20e-6)
    assert found.descriptor_s == pytest.approx(3e-6)
    assert found.run_s == pytest.approx(2e-6)
    assert (found.copy_bytes_per_s, found.slot_s) == (before.copy_bytes_per_s, before.slot_s)


def test_a_busy_machine_does_not_make_descriptors_free() -> None:
    """Every write in one piece is delayed, and every write of a few pieces."""
    found = calibrated(
        lambda binding: 4e-4 if binding.num_pieces == NUM_PIECES else 0.1, PRESETS["nixl-host"]
    )
    assert found.descriptor_s == pytest.approx(1e-4 / NUM_PIECES)
    assert found.run_s is not None
    assert 0 < found.run_s <= found.descriptor_s
    assert found.bytes_per_s == SCRATCH_BYTES / 0.1


def test_two_nearly_equal_times_do_not_make_bytes_free() -> None:
    found = calibrated(link(1e-3, 1e15, 1e-6, 1e-6), PRESETS["nixl-host"])
    assert found.bytes_per_s <= 16 * SCRATCH_BYTES / 1e-3


# NIXL through cuda_ipc on an H200: 1 MiB at 45 GB/s, 16 MiB at 459, 128 MiB at 673, and 7.6 us
# for a piece of 512 bytes. So a write takes 22 us at all, and its bytes 1.2 TB/s.
H200_WRITE_S, H200_BYTES_PER_S = 22.4e-6, 1.187e12


def h200(large_s: float) -> LinkCost:
    """Calibrate with default staging, whose slots have 64 MiB."""
    before = PRESETS["nixl-gpu"]
    costs = link(H200_WRITE_S, H200_BYTES_PER_S, 7.6e-6, large_s)
    return calibrated(costs, before, GPU_SCRATCH_BYTES)


@pytest.mark.parametrize(("num_bytes", "gb_per_s"), [(MIB, 45), (16 * MIB, 459), (128 * MIB, 673)])
def test_predictions_for_an_h200_match_measurements(num_bytes: int, gb_per_s: float) -> None:
    found = h200(RUN_S)
    predicted = found.write_s + num_bytes / found.bytes_per_s
    assert predicted == pytest.approx(num_bytes / gb_per_s / 1e9, rel=0.5)


# Runs of 128 KiB took 94 ms, and staging with 128 MiB in one slot 16.3 ms.
RUN_S = 5.6e-6


def test_fragmented_pages_at_equal_tp_on_an_h200_are_staged() -> None:
    choice = choose(EQUAL, h200(RUN_S))
    assert choice.mode is TransferMode.STAGED
    assert choice.seconds[TransferMode.RUNS] == pytest.approx(0.094, rel=0.1)
    one_slot = choose(EQUAL, replace(h200(RUN_S), slot_bytes=128 * MIB))
    assert one_slot.predicted_s == pytest.approx(0.0163, rel=0.2)


def test_contiguous_pages_at_equal_tp_on_an_h200_go_as_runs() -> None:
    """They took 3.5 ms."""
    choice = choose(EQUAL._replace(runs=64 * 2), h200(RUN_S))
    assert choice.mode is TransferMode.RUNS
    assert choice.predicted_s == pytest.approx(0.003, rel=0.3)


def test_small_pieces_on_an_h200_are_staged() -> None:
    assert choose(UNEQUAL, h200(RUN_S)).mode is TransferMode.STAGED
