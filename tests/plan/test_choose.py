"""Tests of the chooser and of estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.layout import ExplicitSharding, Layout, Parallel, Shard, Span, Tokens, attention
from kvferry.plan import (
    PRESETS,
    BlockShape,
    LinkCost,
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    TransferMode,
    bind,
    choose,
    contiguous_pools,
    estimate,
    reshard,
    shape_of,
)
from kvferry.testing.strategies import MAX_TOKENS, pairs

HOST = PRESETS["nixl-host"]
SPEC = attention(layers=4, kv_heads=8, head_dim=128)


def test_many_small_pieces_are_staged_and_few_large_ones_are_not() -> None:
    assert choose(BlockShape(1 << 28, 1 << 19, 1 << 19, False), HOST).mode is TransferMode.STAGED
    assert choose(BlockShape(1 << 28, 64, 64, False), HOST).mode is TransferMode.SLICES
    assert choose(BlockShape(1 << 28, 64, 1, True), HOST).mode is TransferMode.RUNS


def test_ties_go_to_the_simpler_mode() -> None:
    assert choose(BlockShape(1 << 20, 8, 8, True), HOST).mode is TransferMode.RUNS


@pytest.mark.parametrize("link", ["nixl-host", "nixl-gpu", "rdma-400g", "mooncake"])
def test_contiguous_pages_at_equal_tp_go_as_one_run_for_each_tensor(link: str) -> None:
    """Qwen3-32B's cache for 8192 tokens in pages of 64. K and V of a layer are a run each."""
    layout = Layout(attention(layers=64, kv_heads=8, head_dim=128), page_tokens=64)
    pools = contiguous_pools(layout, 0, 256).map
    source, target = (
        PagedView(pools, {"kv": PageTable(np.arange(first, first + 128))}) for first in (5, 99)
    )
    shape = shape_of(bind(reshard(layout, layout), RankPair(0, 0), Request(8192), source, target))
    assert shape == BlockShape(2 << 30, 2 * 64 * 128, 2 * 64, contiguous=True)
    assert choose(shape, PRESETS[link]).mode is TransferMode.RUNS


def test_a_transport_that_maps_the_peer_never_stages() -> None:
    choice = choose(BlockShape(1 << 28, 1 << 20, 1 << 20, False), PRESETS["shm"])
    assert choice.mode is TransferMode.SLICES
    assert TransferMode.STAGED not in choice.seconds


def test_override_is_used_if_open() -> None:
    shape = BlockShape(1 << 20, 4096, 4096, False)
    assert choose(shape, HOST, TransferMode.SLICES).mode is TransferMode.SLICES
    with pytest.raises(InputError, match="not open"):
        choose(shape, HOST, TransferMode.RUNS)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.booleans(), st.sampled_from([*PRESETS]))
def test_choice_is_the_fastest_open_mode(
    num_bytes: int, pieces: int, contiguous: bool, name: str
) -> None:
    choice = choose(BlockShape(num_bytes, pieces, pieces // 2, contiguous), PRESETS[name])
    assert choice.predicted_s == min(choice.seconds.values())
    assert (TransferMode.RUNS in choice.seconds) == contiguous


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_per_s": 0},
        {"bytes_per_s": math.nan},
        {"bytes_per_s": math.inf},
        {"copy_bytes_per_s": -1},
        {"descriptor_s": -1},
        {"descriptor_s": math.nan},
        {"slot_s": math.inf},
        {"room_s": -1},
        {"slot_bytes": 0},
    ],
)
def test_invalid_costs_are_refused(change: dict[str, float]) -> None:
    values = {"descriptor_s": 1.0, "bytes_per_s": 1.0, "copy_bytes_per_s": 1.0} | change
    with pytest.raises(InputError):
        LinkCost(**values)  # type: ignore[arg-type]


def test_estimate_counts_as_the_binding_does() -> None:
    plan = reshard(Layout(SPEC, Parallel(tp=2)), Layout(SPEC))
    costs = estimate(plan, Request(100), HOST)
    assert costs.num_bytes == plan.payload_bytes(Request(100)) == 100 * 4 * 8 * 512
    assert costs.pieces(TransferMode.SLICES) == 2 * 4 * 2 * 100
    assert costs.pieces(TransferMode.STAGED) == 2
    assert sum(costs.carried(mode) for mode in TransferMode) == costs.num_bytes


def test_move_that_fills_several_slots_counts_each() -> None:
    plan = reshard(Layout(SPEC, Parallel(tp=2)), Layout(SPEC))
    tokens = 3 * HOST.slot_bytes // (4 * 4 * 512) + 1
    assert estimate(plan, Request(tokens), HOST).pieces(TransferMode.STAGED) == 2 * 4
    assert estimate(plan, Request(tokens - 1), HOST).pieces(TransferMode.STAGED) == 2 * 3


def made_up(layout: Layout, rank: int, tokens: int, gap: int) -> PagedView:
    num_pages = -(-tokens // layout.smallest_page)
    tables = {group.name: PageTable(np.arange(num_pages) * gap) for group in layout.spec.groups}
    return PagedView(contiguous_pools(layout, rank, gap * num_pages).map, tables)


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.booleans())
def test_equal_moves_count_as_if_each_were_bound(
    pair: tuple[Layout, Layout], tokens: int, prefix: int, scattered: bool
) -> None:
    plan, request = reshard(*pair), Request(tokens, min(tokens, prefix))
    costs = estimate(plan, request, HOST, scattered=scattered)
    assert [one.move for one in costs.moves] == [m for m in plan.moves if plan.bytes_of(m, request)]
    for one in costs.moves:
        ranks = RankPair(one.move.source, one.move.target)
        source, target = (
            made_up(layout, rank, tokens, 1 + scattered)
            for layout, rank in zip(pair, ranks, strict=True)
        )
        only = Plan(*pair, (one.move,))
        assert one.shape == shape_of(bind(only, ranks, request, source, target))


def test_moves_that_begin_elsewhere_are_counted_separately() -> None:
    """Two moves of 15 tokens touch the same pages. Only in one do pages of both sides align."""
    spec = attention(layers=1, kv_heads=2, head_dim=1)
    shares = [
        Shard("kv", Span(0, 1), Span(unit, unit + 1), tokens)
        for unit, cut in ((0, 4), (1, 5))
        for tokens in (Tokens(0, cut), Tokens(cut, cut + 16), Tokens(cut + 16, None))
    ]
    target = Layout(spec, ExplicitSharding(tuple((share,) for share in shares)), page_tokens=4)
    costs = estimate(reshard(Layout(spec, Parallel(tp=2)), target), Request(40), HOST)
    assert [one.shape.slices for one in costs.moves if one.move.target in (1, 4)] == [2, 8, 10, 2]


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
