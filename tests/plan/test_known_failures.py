"""Geometry bugs of other systems, G1 to G10 in the list of known failures."""

from __future__ import annotations

import numpy as np
import pytest
from moving import MOVERS, by_slices, expected, filled, make_ranks, move_all, random_cache
from oracle import assert_exactly_once

from kvferry.errors import ReasonCode, Refused
from kvferry.layout import (
    CacheSpec,
    DType,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    StateRow,
    Tensor,
    attention,
    mismatches,
)
from kvferry.plan import (
    Base,
    PagedView,
    PageTable,
    Placement,
    PoolMap,
    RankPair,
    Request,
    bind,
    check,
    reshard,
)


def assert_bytes(source: Layout, target: Layout, request: Request) -> None:
    """Plan, check, bind, copy in every mode, and compare all memory."""
    plan = reshard(source, target)
    check(plan)
    assert_exactly_once(plan, request)
    for mover in MOVERS.values():
        rng = np.random.default_rng(7)
        cache = random_cache(plan.spec, request.num_tokens, rng)
        sources = filled(source, cache, request, rng)
        targets = make_ranks(target, request.num_tokens, rng)
        wanted = expected(targets, cache, request)
        move_all(plan, request, sources, targets, mover)
        for rank, regions in zip(targets, wanted, strict=True):
            for got, want in zip(rank.regions, regions, strict=True):
                np.testing.assert_array_equal(got, want)


def sides(
    spec: CacheSpec, source: Parallel, target: Parallel, pages: tuple[int, int] = (4, 4)
) -> tuple[Layout, Layout]:
    return (
        Layout(spec, source, page_tokens=pages[0]),
        Layout(spec, target, page_tokens=pages[1]),
    )


@pytest.mark.parametrize(("source", "target"), [(8, 2), (2, 8), (8, 4), (8, 1), (4, 8)])
def test_g1_fewer_heads_than_ranks(source: int, target: int) -> None:
    spec = attention(layers=3, kv_heads=2, head_dim=2)
    assert_bytes(*sides(spec, Parallel(tp=source), Parallel(tp=target)), Request(11))


@pytest.mark.parametrize(("source", "target", "heads"), [(4, 8, 2), (2, 4, 1), (8, 16, 4)])
def test_g2_prefill_replicates_and_decode_has_more_ranks(
    source: int, target: int, heads: int
) -> None:
    spec = attention(layers=3, kv_heads=heads, head_dim=2)
    assert_bytes(*sides(spec, Parallel(tp=source), Parallel(tp=target)), Request(9))


def test_g3_six_to_four_loses_no_head() -> None:
    spec = attention(layers=2, kv_heads=12, head_dim=2)
    assert_bytes(*sides(spec, Parallel(tp=6), Parallel(tp=4)), Request(10))
    with pytest.raises(Refused) as caught:
        Layout(attention(layers=2, kv_heads=8, head_dim=2), Parallel(tp=6))
    assert [reason.code for reason in caught.value.reasons] == [ReasonCode.TP_UNITS]


def test_g4_one_prefill_serves_decodes_of_different_tp_at_once() -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=2)
    source, request = Layout(spec, page_tokens=4), Request(13)
    rng = np.random.default_rng(1)
    cache = random_cache(spec, 13, rng)
    sources = filled(source, cache, request, rng)
    both = []
    for tp in (2, 4):
        target = Layout(spec, Parallel(tp=tp), page_tokens=8)
        ranks = make_ranks(target, 13, rng)
        both.append((reshard(source, target), ranks, expected(ranks, cache, request)))
    # Interleave the two, pair by pair, as a prefill that serves both would.
    for rank in range(4):
        for plan, ranks, _ in both:
            if rank < len(ranks):
                by_slices(plan, RankPair(0, rank), request, sources[0], ranks[rank])
    for _, ranks, wanted in both:
        for got, want in zip(ranks, wanted, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(got.regions, want, strict=True))


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (4, 4)])
def test_g5_k_and_v_head_dims_differ(source: int, target: int) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=3, v_head_dim=2)
    assert_bytes(*sides(spec, Parallel(tp=source), Parallel(tp=target)), Request(10))


def test_g6_offsets_are_64_bit() -> None:
    """2M tokens times 160 buffers in one region have exact offsets far beyond 32 bits."""
    spec = attention(layers=80, kv_heads=8, head_dim=128)
    layout = Layout(spec, page_tokens=64)
    num_pages, page = (1 << 21) // 64, 64 * 8 * 256
    layer_bytes = num_pages * page

    def placement(tensor: str, first: int) -> Placement:
        bases = tuple(Base(n, 0, (2 * n + first) * layer_bytes) for n in range(80))
        return Placement("kv", tensor, page, 8 * 256, 256, num_pages, bases)

    pools = PoolMap((placement("k", 0), placement("v", 1)))
    table = PageTable([num_pages - 1, 0])
    side = PagedView(pools, {"kv": table})
    pieces = bind(reshard(layout, layout), RankPair(0, 0), Request(128), side, side).descriptors()
    exact = {
        (2 * n + first) * layer_bytes + p * page
        for n in range(80)
        for first in (0, 1)
        for p in (num_pages - 1, 0)
    }
    assert max(exact) > 1 << 39
    assert set(pieces.source_offset.tolist()) == exact
    assert set(pieces.target_offset.tolist()) == exact


def test_g7_uneven_pipeline_stages_pair_by_layer_number() -> None:
    spec = attention(layers=8, kv_heads=2, head_dim=2)
    source, target = Parallel(pp=2, stages=(3, 5)), Parallel(tp=2, pp=3, stages=(5, 1, 2))
    assert_bytes(*sides(spec, source, target), Request(6))


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize(("ours", "theirs"), [("nhd", "hnd"), ("hnd", "nhd"), ("hnd", "hnd")])
def test_g8_page_orders_differ(source: int, target: int, ours: str, theirs: str) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=2)
    one = Layout(spec, Parallel(tp=source), page_tokens=4, order=Order(ours))
    two = Layout(spec, Parallel(tp=target), page_tokens=8, order=Order(theirs))
    assert_bytes(one, two, Request(13, 3))


def test_g9_no_two_sources_write_the_same_target_byte() -> None:
    state = Group("s", StateRow(), (0, 1, 2, 3), 2, (Tensor("s", DType.FLOAT32, 3),))
    kv = Group("kv", Paged(), (0, 1, 2, 3), 2, (Tensor("k", DType.BFLOAT16, 2),))
    spec = CacheSpec(4, (kv, state))
    source, target = sides(spec, Parallel(tp=4, pp=4), Parallel())
    plan, rng = reshard(source, target), np.random.default_rng(3)
    senders, (receiver,) = make_ranks(source, 9, rng), make_ranks(target, 9, rng)
    writes = [np.zeros(len(region), dtype=np.int64) for region in receiver.regions]
    for sender in senders:
        pair = RankPair(sender.rank, 0)
        pieces = bind(plan, pair, Request(9), sender.side, receiver.side).descriptors()
        for region, at, length in zip(
            pieces.target_region, pieces.target_offset, pieces.length, strict=True
        ):
            writes[region][at : at + length] += 1
    assert max(region.max() for region in writes) == 1


@pytest.mark.parametrize("target_dtype", [DType.FLOAT8_E4M3, DType.FLOAT16])
def test_g10_different_dtypes_are_refused_even_at_equal_width(target_dtype: DType) -> None:
    ours = attention(layers=2, kv_heads=2, head_dim=2, dtype=DType.BFLOAT16)
    theirs = attention(layers=2, kv_heads=2, head_dim=2, dtype=target_dtype)
    codes = {reason.code for reason in mismatches(ours, theirs)}
    assert codes == {ReasonCode.DTYPE}
    with pytest.raises(Refused, match="one KV-cache dtype"):
        reshard(Layout(ours), Layout(theirs))
