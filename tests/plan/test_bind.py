"""Tests of bindings on real arrays: every byte of the request is copied, and no other byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import (
    MOVERS,
    by_runs,
    by_slices,
    every_nth,
    expected,
    filled,
    make_ranks,
    move_all,
    random_cache,
)
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.layout import (
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    Shard,
    Span,
    Tensor,
    Tokens,
    Window,
    attention,
)
from kvferry.plan import (
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    StagingView,
    bind,
    contiguous_pools,
    reshard,
)
from kvferry.testing.strategies import MAX_TOKENS, pairs


def assert_moves(plan: Plan, request: Request, path: str, seed: int, drop: bool = False) -> None:
    rng = np.random.default_rng(seed)
    cache = random_cache(plan.spec, request.num_tokens, rng)
    sources = filled(plan.source, cache, request, rng)
    targets = make_ranks(plan.target, request.num_tokens, rng, drop_pages=drop)
    wanted = expected(targets, cache, request)
    move_all(plan, request, sources, targets, MOVERS[path])
    for target, regions in zip(targets, wanted, strict=True):
        for got, want in zip(target.regions, regions, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("path", MOVERS)
@settings(max_examples=80, deadline=None)
@given(
    pairs(),
    st.integers(0, MAX_TOKENS),
    st.integers(0, MAX_TOKENS),
    st.integers(0, 9),
    st.booleans(),
)
def test_any_layout_to_any_layout(
    path: str, pair: tuple[Layout, Layout], tokens: int, prefix: int, seed: int, drop: bool
) -> None:
    assert_moves(reshard(*pair), Request(tokens, min(tokens, prefix)), path, seed, drop)


# Pages by group, as vLLM gives DeepSeek V4 (64, 256, 4 and 8 tokens), and other ones.
V4_PAGES = {"swa": 64, "sparse": 256, "heavy": 256, "inputs": 4, "late_inputs": 8}
OTHER_PAGES = {"swa": 16, "sparse": 64, "heavy": 128, "inputs": 3, "late_inputs": 128}
_BYTE = Tensor("bytes", DType.UINT8, 5)
V4_GROUPS = CacheSpec(
    3,
    (
        Group("swa", Window(128), (0, 1, 2), 1, (_BYTE,)),
        Group("sparse", Paged(), (1,), 1, (_BYTE, Tensor("scale", DType.UINT8, 3)), 4),
        Group("heavy", Paged(), (2,), 1, (_BYTE,), 128),
        Group("inputs", Window(8), (1,), 1, (Tensor("kv", DType.FLOAT32, 2),)),
        Group("late_inputs", Window(128), (2,), 1, (Tensor("kv", DType.FLOAT32, 1),)),
    ),
)
SHARED = Parallel(tp=2, dcp=2, interleave=128)


@pytest.mark.parametrize("path", MOVERS)
@pytest.mark.parametrize(("source", "target"), [(1, 2), (SHARED, 1), (2, SHARED)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 127, 261, 645])
def test_groups_with_pages_of_different_sizes(
    path: str, source: Parallel | int, target: Parallel | int, tokens: int
) -> None:
    for sizes in ((V4_PAGES, OTHER_PAGES), (OTHER_PAGES, V4_PAGES)):
        plan = reshard(
            *(
                Layout(
                    V4_GROUPS,
                    Parallel(tp=side) if isinstance(side, int) else side,
                    page_tokens=128,
                    order=order,
                    group_pages=tuple(own.items()),
                )
                for side, order, own in zip((source, target), Order, sizes, strict=True)
            )
        )
        for prefix in (0, tokens // 3):
            assert_moves(plan, Request(tokens, prefix), path, tokens)


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(1, MAX_TOKENS), st.integers(0, 9))
def test_round_trip_restores_every_byte(
    pair: tuple[Layout, Layout], tokens: int, seed: int
) -> None:
    there, back = reshard(*pair), reshard(pair[1], pair[0])
    rng = np.random.default_rng(seed)
    request = Request(tokens)
    cache = random_cache(there.spec, tokens, rng)
    first = filled(pair[0], cache, request, rng)
    middle = make_ranks(pair[1], tokens, rng)
    last = make_ranks(pair[0], tokens, rng)
    wanted = expected(last, cache, request)
    move_all(there, request, first, middle, by_runs)
    move_all(back, request, middle, last, by_slices)
    for rank, regions in zip(last, wanted, strict=True):
        for got, want in zip(rank.regions, regions, strict=True):
            np.testing.assert_array_equal(got, want)


@settings(max_examples=40, deadline=None)
@given(pairs(), st.integers(1, MAX_TOKENS), st.sets(st.integers(1, MAX_TOKENS), max_size=3))
def test_chunks_add_up_to_the_request(
    pair: tuple[Layout, Layout], tokens: int, cuts: set[int]
) -> None:
    plan, request = reshard(*pair), Request(tokens)
    rng = np.random.default_rng(0)
    sources = make_ranks(pair[0], tokens, rng)
    targets = make_ranks(pair[1], tokens, rng)
    edges = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
    for source in sources:
        for target in targets:
            ends = (RankPair(source.rank, target.rank), request, source.side, target.side)
            blocks = plan.blocks(source.rank, target.rank, request)
            chunks = [
                bind(
                    plan,
                    *ends,
                    [replace(b, tokens=b.tokens.intersect(Span(*edge))) for b in blocks],
                )
                for edge in itertools.pairwise(edges)
            ]
            layers = [
                bind(
                    plan,
                    *ends,
                    [replace(b, layers=Span(n, n + 1)) for b in blocks if n in b.layers],
                )
                for n in range(plan.spec.num_layers)
            ]
            whole = bind(plan, *ends).num_bytes
            assert sum(c.num_bytes for c in chunks) == sum(c.num_bytes for c in layers) == whole


# ---------------------------------------------------------------- pieces


def two_sides(
    source: Layout, target: Layout, tokens: int, neighbours: bool = False
) -> tuple[Plan, PagedView, PagedView]:
    plan = reshard(source, target)
    rng = np.random.default_rng(0)
    sides = []
    for layout in (source, target):
        (first, *_) = make_ranks(layout, tokens, rng)
        if neighbours:
            count = -(-tokens // layout.page_tokens)
            first.side.tables["kv"] = PageTable(np.arange(count))
        sides.append(first.side)
    return plan, sides[0], sides[1]


def spec8() -> CacheSpec:
    return attention(layers=2, kv_heads=8, head_dim=4)


def count(plan: Plan, source: PagedView, target: PagedView, tokens: int) -> tuple[int, int, bool]:
    binding = bind(plan, RankPair(0, 0), Request(tokens), source, target)
    return binding.num_pieces, binding.merged().num_pieces, binding.contiguous


def hnd(sharding: Parallel | None = None, page_tokens: int = 16) -> Layout:
    return Layout(spec8(), sharding or Parallel(), page_tokens=page_tokens, order=Order.HND)


TENSORS = 2 * 2  # layers times K and V


@pytest.mark.parametrize(
    ("source", "target", "pieces", "contiguous"),
    [
        # Equal shards: a piece per page. Different page sizes: per smaller page.
        (Layout(spec8()), Layout(spec8()), 4, True),
        (Layout(spec8()), Layout(spec8(), page_tokens=64), 4, True),
        (hnd(), hnd(), 4, True),
        # Different shards: a piece per token in NHD, per page in HND.
        (Layout(spec8(), Parallel(tp=2)), Layout(spec8()), 64, False),
        (hnd(Parallel(tp=2)), hnd(), 4, True),
        # Different page sizes in HND: a piece per page and head. Different orders: per unit.
        (hnd(), hnd(page_tokens=64), 32, False),
        (Layout(spec8()), hnd(), 512, False),
        # Pages of one token: a piece each, whatever the shards and the order.
        (Layout(spec8(), Parallel(tp=2), page_tokens=1), Layout(spec8()), 64, True),
        (Layout(spec8(), Parallel(tp=2)), hnd(page_tokens=1), 64, True),
    ],
)
def test_pieces_per_tensor(source: Layout, target: Layout, pieces: int, contiguous: bool) -> None:
    plan, ours, theirs = two_sides(source, target, tokens=64)
    assert count(plan, ours, theirs, 64)[::2] == (pieces * TENSORS, contiguous)


@pytest.mark.parametrize("tokens", [5, 50, 64])
def test_partial_page_keeps_runs_open(tokens: int) -> None:
    """In HND a partial page has a piece for each head, a full page a single piece."""
    partial, full = tokens % 16 and 1, tokens // 16
    for source, target, apart in ((hnd(), hnd(), 8), (Layout(spec8()), Layout(spec8()), 1)):
        plan, ours, theirs = two_sides(source, target, tokens)
        pieces = (full + partial * apart) * TENSORS
        assert count(plan, ours, theirs, tokens)[::2] == (pieces, True)


def test_runs_is_closed_if_a_full_page_is_several_pieces() -> None:
    for source, target in ((hnd(), hnd(page_tokens=64)), (Layout(spec8()), hnd())):
        plan, ours, theirs = two_sides(source, target, 50)
        assert not count(plan, ours, theirs, 50)[2]


@pytest.mark.parametrize(("first", "contiguous"), [(32, True), (5, False)])
def test_equal_pages_that_begin_at_different_tokens_never_fill(
    first: int, contiguous: bool
) -> None:
    """A target that holds the tokens from 5 on has page boundaries at 5, 21, ..."""
    kv, rest = Shard("kv", Span(0, 2), Span(0, 8)), Tokens(first, None)
    late = ExplicitSharding(((replace(kv, tokens=rest),), (replace(kv, tokens=Tokens(0, first)),)))
    source, target = hnd(), Layout(spec8(), late, order=Order.HND)
    plan, ours, theirs = two_sides(source, target, 64)
    binding = bind(plan, RankPair(0, 0), Request(64), ours, theirs)
    assert binding.contiguous is contiguous
    assert (binding.num_pieces == 2 * TENSORS) is contiguous


def test_only_some_moves_of_a_pair_can_be_bound() -> None:
    """Two replicas alternate where others cut the layers, so the pair has two moves."""
    spec, request, pair = attention(layers=4, kv_heads=2, head_dim=4), Request(64), RankPair(0, 0)
    whole = Shard("kv", Span(0, 4), Span(0, 2))
    mine = replace(whole, units=Span(0, 1))
    others = (Shard("kv", layers, Span(1, 2)) for layers in (Span(0, 2), Span(2, 4)))
    target = Layout(spec, ExplicitSharding(((mine,), *((other,) for other in others))))
    plan, ours, theirs = two_sides(Layout(spec, ExplicitSharding(((whole,), (whole,)))), target, 64)
    one, two = plan.between(*pair)
    for moves in ((), (one,), (two,), (one, two)):
        binding = bind(plan, pair, request, ours, theirs, moves=moves)
        assert binding.num_bytes == sum(plan.bytes_of(move, request) for move in moves)
    assert str(binding) == str(bind(plan, pair, request, ours, theirs))


def test_adjacent_pages_merge_into_one_run() -> None:
    plan, ours, theirs = two_sides(Layout(spec8()), Layout(spec8()), 64, neighbours=True)
    assert count(plan, ours, theirs, 64) == (4 * TENSORS, TENSORS, True)


def test_a_partial_last_page_stays_partial() -> None:
    plan, ours, theirs = two_sides(Layout(spec8()), Layout(spec8()), 50)
    lengths = bind(plan, RankPair(0, 0), Request(50), ours, theirs).descriptors().length
    assert sorted(set(lengths.tolist())) == [2 * 8 * 4 * 2, 16 * 8 * 4 * 2]


def test_unrelated_ranks_and_cached_requests_bind_nothing() -> None:
    plan, ours, theirs = two_sides(Layout(spec8(), Parallel(tp=2)), Layout(spec8()), 64)
    for pair, request in ((RankPair(7, 7), Request(64)), (RankPair(0, 0), Request(64, 64))):
        binding = bind(plan, pair, request, ours, theirs)
        assert (binding.num_bytes, len(binding.descriptors().length)) == (0, 0)


# ---------------------------------------------------------------- bad pages


def bad(table: PageTable | None, where: str) -> str:
    plan, ours, theirs = two_sides(Layout(spec8()), Layout(spec8()), 64)
    side = theirs if where == "target" else ours
    if table is None:
        del side.tables["kv"]
    else:
        side.tables["kv"] = table
    with pytest.raises(InputError) as caught:
        bind(plan, RankPair(0, 0), Request(64), ours, theirs)
    return str(caught.value)


@pytest.mark.parametrize("where", ["source", "target"])
def test_invalid_pages_are_refused(where: str) -> None:
    assert "page -8" in bad(PageTable([-8, 1, 2, 3]), where)
    assert "page 0 or 99" in bad(PageTable([0, 1, 2, 99]), where)
    assert "pass every page" in bad(PageTable([0, 1, 2]), where)
    assert "pass every page" in bad(PageTable([0, 1, 2, 3], first_page=1), where)
    assert "no page table" in bad(None, where)


def test_repeated_target_page_is_refused() -> None:
    assert "twice" in bad(PageTable([0, 1, 0, 3]), "target")
    assert "twice" in bad(PageTable([0, 1, 1, 3]), "target")


@pytest.mark.parametrize(
    ("table", "whole"), [([5, 5, 6, 7], True), ([5, 6, 6, 7], True), ([5, 6, 7, 8], False)]
)
@pytest.mark.parametrize("source", [0, 1])
def test_repeated_target_page_is_refused_with_strided_tokens(
    source: int, table: list[int], whole: bool
) -> None:
    """Source 1 begins inside each page, and must detect that two pages are the same."""
    spec = attention(layers=1, kv_heads=1, head_dim=1)
    ours = Layout(spec, Parallel(cp=2), page_tokens=4)
    theirs = Layout(spec, page_tokens=4)
    plan = reshard(ours, theirs)
    sides = (
        PagedView(contiguous_pools(ours, source, 8).map, {"kv": PageTable([0, 1])}),
        PagedView(contiguous_pools(theirs, 0, 9).map, {"kv": PageTable(table)}),
    )
    if not whole:
        assert bind(plan, RankPair(source, 0), Request(16), *sides).num_bytes == 8 * 4
        return
    with pytest.raises(InputError, match="twice"):
        bind(plan, RankPair(source, 0), Request(16), *sides)


def test_page_table_must_be_flat() -> None:
    with pytest.raises(InputError, match="flat"):
        PageTable([[1, 2]])


def test_staging_slot_is_dense_and_ordered() -> None:
    plan, ours, _ = two_sides(Layout(spec8()), Layout(spec8()), 64)
    pieces = bind(plan, RankPair(0, 0), Request(64), ours, StagingView()).descriptors()
    ends = np.sort(pieces.target_offset) + pieces.length[np.argsort(pieces.target_offset)]
    np.testing.assert_array_equal(np.sort(pieces.target_offset)[1:], ends[:-1])
    assert ends[-1] == plan.payload_bytes(Request(64))


def test_tokens_clip_tightly() -> None:
    assert every_nth(1, None, 3).clip(Span(2, 12)) == every_nth(4, 11, 3)
    assert every_nth(1, None, 3).clip(Span(2, 4)).num_tokens == 0
    assert Tokens(0, 5).clip(Span(3, 99)) == Tokens(3, 5)
