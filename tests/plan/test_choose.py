"""The chooser and the estimates that feed it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import PRESETS, Constants, Path, Request, Shape, choose, estimate, reshard

HOST = PRESETS["nixl-host"]
SPEC = attention(layers=4, kv_heads=8, head_dim=128)


def test_many_small_pieces_are_staged_and_few_large_ones_are_not() -> None:
    assert choose(Shape(1 << 28, 1 << 19, 1 << 19, False), HOST).path is Path.STAGED
    assert choose(Shape(1 << 28, 64, 64, False), HOST).path is Path.SLICES
    assert choose(Shape(1 << 28, 64, 1, True), HOST).path is Path.RUNS


def test_ties_go_to_the_simpler_path() -> None:
    assert choose(Shape(1 << 20, 8, 8, True), HOST).path is Path.RUNS


def test_a_transport_that_maps_the_peer_never_stages() -> None:
    choice = choose(Shape(1 << 28, 1 << 20, 1 << 20, False), PRESETS["shm"])
    assert choice.path is Path.SLICES
    assert Path.STAGED not in choice.seconds


def test_an_override_is_followed_where_that_path_is_open() -> None:
    shape = Shape(1 << 20, 4096, 4096, False)
    assert choose(shape, HOST, Path.SLICES).path is Path.SLICES
    with pytest.raises(InputError, match="not open"):
        choose(shape, HOST, Path.RUNS)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.booleans(), st.sampled_from([*PRESETS]))
def test_the_choice_is_never_worse_than_another_open_path(
    num_bytes: int, pieces: int, contiguous: bool, name: str
) -> None:
    choice = choose(Shape(num_bytes, pieces, pieces // 2, contiguous), PRESETS[name])
    assert choice.predicted_s == min(choice.seconds.values())
    assert (Path.RUNS in choice.seconds) == contiguous


@pytest.mark.parametrize(
    "change",
    [{"bytes_per_s": 0}, {"copy_bytes_per_s": -1}, {"descriptor_s": -1}, {"slot_bytes": 0}],
)
def test_constants_that_cannot_be(change: dict[str, float]) -> None:
    values = {"descriptor_s": 1.0, "bytes_per_s": 1.0, "copy_bytes_per_s": 1.0} | change
    with pytest.raises(InputError):
        Constants(**values)  # type: ignore[arg-type]


def test_an_estimate_counts_what_the_binding_would() -> None:
    plan = reshard(Layout(SPEC, Parallel(tp=2)), Layout(SPEC))
    costs = estimate(plan, Request(100), HOST)
    assert costs.num_bytes == plan.payload_bytes(Request(100)) == 100 * 4 * 8 * 512
    assert costs.pieces(Path.SLICES) == 2 * 4 * 2 * 100
    assert costs.pieces(Path.STAGED) == 2
    assert sum(costs.carried(path) for path in Path) == costs.num_bytes


def test_more_sources_are_predicted_faster_until_the_targets_link_is_full() -> None:
    def seconds(tp: int, target_tp: int) -> float:
        plan = reshard(Layout(SPEC, Parallel(tp=tp)), Layout(SPEC, Parallel(tp=target_tp)))
        return estimate(plan, Request(8192), HOST).predicted_s()

    wire = 8192 * 4 * 8 * 512 / HOST.bytes_per_s
    assert seconds(8, 8) < seconds(4, 4) < seconds(1, 1)
    assert seconds(8, 1) >= wire


def test_an_empty_request_costs_nothing() -> None:
    plan = reshard(Layout(SPEC, Parallel(tp=2)), Layout(SPEC))
    for request in (Request(0), Request(5, 5)):
        costs = estimate(plan, request, HOST)
        assert (costs.num_bytes, costs.predicted_s(), costs.moves) == (0, 0.0, ())
