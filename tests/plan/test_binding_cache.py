"""Tests that the binding cache returns what ``bind`` returns, and that it is bounded."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from moving import make_ranks
from msgspec.structs import replace

from kvferry.layout import (
    ALL_TOKENS,
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Paged,
    Parallel,
    Shard,
    Span,
    StateRow,
    Tensor,
    Tokens,
    Window,
    attention,
)
from kvferry.plan import Block, PagedView, Plan, RankPair, Request, StagingView, bind, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.binding_cache import BindingCache, PairPools
from kvferry.plan.places import contiguous_pools


def assert_same(one: Binding, other: Binding) -> None:
    for got, wanted in zip(one.descriptors(), other.descriptors(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def fragments(plan: Plan, pair: RankPair, request: Request, length: int) -> list[Block]:
    """Return all blocks that the source sends, cut into fragments of ``length`` tokens."""
    return [
        replace(block, tokens=Span(first, min(first + length, block.tokens.end)))
        for block in plan.blocks(*pair, request)
        for first in range(block.tokens.first, block.tokens.end, length)
    ]


KIND: dict[str, Paged | Window | StateRow] = {
    "paged": Paged(),
    "window": Window(23),
    "rows": StateRow(),
}
TENSORS = (Tensor("k", DType.UINT8, 3), Tensor("v", DType.UINT8, 3))
HYBRID = CacheSpec(3, tuple(Group(name, kind, (0, 2), 2, TENSORS) for name, kind in KIND.items()))
SHARES = (Tokens(0, 13), Tokens(13, None))
CUT = ExplicitSharding(
    tuple(
        tuple(
            Shard(name, Span(0, 3), Span(0, 2), ALL_TOKENS if name == "rows" else share)
            for name in KIND
        )
        for share in SHARES
    )
)
SHARDINGS: dict[str, Parallel | ExplicitSharding] = {
    "tp1": Parallel(),
    "tp2": Parallel(tp=2),
    "pp2": Parallel(pp=2),
    "cp2": Parallel(cp=2),
    "cp3-by-5": Parallel(cp=3, interleave=5),
    "cut": CUT,
}


@pytest.mark.parametrize("source", SHARDINGS)
@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("pages", [(4, 4), (4, 6), (1, 8)])
def test_fragments_of_many_lengths_in_any_order(
    source: str, target: str, pages: tuple[int, int]
) -> None:
    """One cache serves all pairs, kinds of ends, requests and sizes of fragments."""
    sides = [
        Layout(HYBRID, SHARDINGS[name], page_tokens=page)
        for name, page in zip((source, target), pages, strict=True)
    ]
    plan, chance, rng = reshard(*sides), random.Random(0), np.random.default_rng(0)
    cache = BindingCache()
    for request in (Request(40), Request(37, 5), Request(16), Request(40, 24)):
        ranks = [make_ranks(side, request.num_tokens, rng) for side in sides]
        for ours, theirs in itertools.product(*ranks):
            pair = RankPair(ours.rank, theirs.rank)
            some = [b for n in (1, 3, 4, 7, 12) for b in fragments(plan, pair, request, n)]
            some += [replace(b, layers=b.layers.intersect(Span(0, 1))) for b in some[::3]]
            chance.shuffle(some)
            kinds: list[tuple[PagedView | StagingView, PagedView | StagingView]] = [
                (ours.side, theirs.side),
                (ours.side, StagingView()),
                (StagingView(), theirs.side),
            ]
            for ends in kinds:
                pair_pools = PairPools(plan, pair, *[end.pools for end in ends])
                tables = [end.tables for end in ends]
                for blocks in [*([block] for block in some[:12]), some[:3]]:
                    wanted = bind(plan, pair, request, *ends, blocks)
                    assert_same(cache.template(pair_pools, request, blocks).bind(*tables), wanted)


SPEC = attention(layers=2, kv_heads=2, head_dim=8)
PAIR = RankPair(0, 0)
NUM_PAGES = 256


def plain_plan(page_tokens: int = 4) -> Plan:
    return reshard(*[Layout(SPEC, Parallel(), page_tokens=page_tokens)] * 2)


def test_second_fragment_of_one_size_is_a_hit() -> None:
    plan, request, cache = plain_plan(), Request(4 * NUM_PAGES), BindingCache()
    pools = contiguous_pools(plan.target, 0, NUM_PAGES).map
    for source in (None, pools):
        pair_pools, before = PairPools(plan, PAIR, source, pools), cache.num_made
        for block in fragments(plan, PAIR, request, 16):
            cache.template(pair_pools, request, [block])
        assert cache.num_made == before + 1


def test_fragments_of_one_size_are_a_hit_if_ranks_take_turns() -> None:
    source, target = Parallel(cp=4, interleave=8), Parallel(cp=2, interleave=2)
    plan = reshard(*(Layout(SPEC, side, page_tokens=4) for side in (source, target)))
    assert plan.page_cycle(0, 0, "kv") == (32, 2, 4)
    request, cache = Request(NUM_PAGES), BindingCache()
    pools = contiguous_pools(plan.target, 0, NUM_PAGES).map
    for number, block in enumerate(fragments(plan, PAIR, request, 16)):
        cache.template(PairPools(plan, PAIR, pools, None), request, [block])
        # The pair carries the first 8 of every 32 tokens.
        assert cache.num_made == min(2, number + 1)


def test_repeated_blocks_and_state_rows_are_a_hit() -> None:
    plan, request, cache = (
        reshard(*[Layout(HYBRID, Parallel(), page_tokens=4)] * 2),
        Request(8),
        BindingCache(),
    )
    pair_pools = PairPools(plan, PAIR, None, contiguous_pools(plan.target, 0, 4).map)
    owed = plan.blocks(*PAIR, request)
    for blocks in (owed, [block for block in owed if block.group == "rows"]):
        before = cache.num_made
        first = cache.template(pair_pools, request, blocks)
        assert cache.template(pair_pools, request, blocks) is first
        assert cache.num_made == before + 1


def test_plans_and_pools_have_separate_templates() -> None:
    one, other, cache = plain_plan(), plain_plan(8), BindingCache()
    pools = contiguous_pools(one.target, 0, NUM_PAGES).map
    request = Request(4)
    for plan in (one, other, one):
        (block,) = plan.blocks(*PAIR, request)
        for source in (None, pools):
            cache.template(PairPools(plan, PAIR, source, pools), request, [block])
    assert cache.num_made == cache.num_templates == 4


def test_cache_is_bounded() -> None:
    plan, request = plain_plan(), Request(4 * NUM_PAGES)
    cache = BindingCache(max_templates=8, max_bindings=3)
    pair_pools = PairPools(plan, PAIR, None, contiguous_pools(plan.target, 0, NUM_PAGES).map)
    for length in range(1, 30):
        cache.template(pair_pools, request, fragments(plan, PAIR, request, length)[:1])
        assert cache.num_templates <= 8
    cache.template(pair_pools, request, fragments(plan, PAIR, request, 29)[:1])
    assert cache.num_made == 29, "the newest templates are cached"
    made = [Binding(()) for _ in range(5)]
    for number, binding in enumerate(made):
        cache.keep("r", number, binding)
    assert cache.num_bindings == 3
    assert [cache.get("r", number) is made[number] for number in range(5)] == [False] * 2 + [
        True
    ] * 3


def test_binding_is_kept_until_dropped_or_room_ends() -> None:
    cache, one, other = BindingCache(), Binding(()), Binding(())
    cache.keep("r", 1, one)
    cache.keep("s", 1, other)
    assert cache.drop("r", 1) is one
    assert cache.drop("r", 1) is None
    cache.keep("r", 2, one)
    cache.forget("r")
    assert (cache.get("r", 2), cache.num_bindings) == (None, 1)
    assert cache.get("s", 1) is other
