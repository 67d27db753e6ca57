"""Cutting blocks into fragments that fit a slot, and merging blocks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import make_ranks

from kvferry.layout import DType, Layout, Paged, Parallel, Span, StateRow, attention
from kvferry.layout.spec import CacheSpec, Group, Tensor
from kvferry.plan import Block, Plan, RankPair, Request, StagingView, bind, reshard
from kvferry.protocol.cutting import cut_to_slots, image_bytes, join_layers, merge, within
from kvferry.testing.strategies import MAX_TOKENS, pairs

Cells = Counter[tuple[str, int, int]]


def cells(plan: Plan, blocks: list[Block] | tuple[Block, ...]) -> Cells:
    return Counter(
        (block.group, layer, token)
        for block in blocks
        for layer in plan.spec.group(block.group).layers_in(block.layers)
        for token in range(block.tokens.first, block.tokens.end)
    )


@settings(max_examples=100, deadline=None)
@given(pairs(), st.integers(1, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.integers(1, 400))
def test_fragments_cover_exactly_and_fit(
    pair: tuple[Layout, Layout], tokens: int, prefix: int, slot_bytes: int
) -> None:
    plan, request = reshard(*pair), Request(tokens, min(prefix, tokens))
    sources = make_ranks(plan.source, tokens, np.random.default_rng(0))
    for source, target in itertools.product(
        range(plan.source.num_ranks), range(plan.target.num_ranks)
    ):
        for block in plan.blocks(source, target, request):
            fragments = cut_to_slots(plan, source, target, block, slot_bytes)
            if fragments is None:
                assert slot_bytes < one_token(plan, source, target, block)
                continue
            assert cells(plan, fragments) == cells(plan, (block,))
            for fragment in fragments:
                side = sources[source].side
                image = bind(
                    plan, RankPair(source, target), request, side, StagingView(), [fragment]
                )
                assert image.num_bytes <= slot_bytes
                size = image_bytes(plan, source, target, request, [fragment])
                assert size == image.num_bytes


def one_token(plan: Plan, source: int, target: int, block: Block) -> int:
    """Return the maximum size of one token of one layer."""
    unit_bytes = plan.spec.group(block.group).unit_bytes
    moves = plan.between(source, target)
    return sum(len(m.units) for m in moves if m.group == block.group) * unit_bytes


def test_whole_tokens_before_layers() -> None:
    spec = attention(layers=3, kv_heads=1, head_dim=1, dtype=DType.UINT8)
    plan = reshard(Layout(spec), Layout(spec))
    block = Block("kv", Span(0, 3), Span(0, 4))
    assert cut_to_slots(plan, 0, 0, block, 12) == [
        Block("kv", Span(0, 3), Span(0, 2)),
        Block("kv", Span(0, 3), Span(2, 4)),
    ]
    assert cut_to_slots(plan, 0, 0, block, 24) == [block]


def test_cut_is_even_and_at_page_boundaries() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1, dtype=DType.UINT8)
    plan = reshard(Layout(spec, page_tokens=4), Layout(spec, page_tokens=6))
    for num_tokens, slot_bytes, expected in [
        (100, 198, [60, 40]),  # two, and both pages end at every twelfth token
        (100, 110, [50, 50]),  # no stretch of whole pages would do with two
        (97, 50, [24, 24, 24, 24, 1]),  # one more, for whole pages
        (96, 50, [24, 24, 24, 24]),
    ]:
        fragments = cut_to_slots(
            plan, 0, 0, Block("kv", Span(0, 1), Span(0, num_tokens)), slot_bytes
        )
        assert [len(fragment.tokens) for fragment in fragments or ()] == expected


def test_layers_are_cut_if_that_needs_fewer_blocks() -> None:
    spec = attention(layers=8, kv_heads=1, head_dim=1, dtype=DType.UINT8)
    plan = reshard(*[Layout(spec, page_tokens=4)] * 2)
    block = Block("kv", Span(0, 8), Span(0, 32))
    # Seven tokens of all layers fit, which is one page; two pages do of seven layers.
    upper, last = Span(0, 7), Span(7, 8)
    assert cut_to_slots(plan, 0, 0, block, 120) == [
        *[Block("kv", upper, Span(first, first + 8)) for first in range(0, 32, 8)],
        Block("kv", last, Span(0, 32)),
    ]
    # Three pages fit of all layers, and four of six: that would be no fewer.
    fragments = cut_to_slots(plan, 0, 0, block, 8 * 2 * 13)
    assert [len(one.layers) for one in fragments or ()] == [8, 8, 8]


def test_a_slot_is_filled_with_every_other_token() -> None:
    spec = attention(layers=1, kv_heads=1, head_dim=1, dtype=DType.UINT8)
    plan = reshard(Layout(spec, Parallel(cp=2)), Layout(spec))
    request = Request(16)
    (block,) = plan.blocks(0, 0, request)
    assert image_bytes(plan, 0, 0, request, [block]) == 16, "half of the tokens, K and V"
    fragments = cut_to_slots(plan, 0, 0, block, 8)
    assert fragments is not None
    sizes = [image_bytes(plan, 0, 0, request, [fragment]) for fragment in fragments]
    assert sizes == [8, 8]


def test_a_state_row_larger_than_a_slot_is_cut_by_layers() -> None:
    state = Group("state", StateRow(), (0, 2, 3), 1, (Tensor("s", DType.UINT8, 10),))
    other = Group("kv", Paged(), (1,), 1, (Tensor("k", DType.UINT8, 1),))
    spec = CacheSpec(4, (state, other))
    plan = reshard(Layout(spec), Layout(spec, Parallel()))
    (block,) = [b for b in plan.blocks(0, 0, Request(5)) if b.group == "state"]
    assert cut_to_slots(plan, 0, 0, block, 25) == [
        Block("state", Span(0, 3), Span(4, 5)),
        Block("state", Span(3, 4), Span(4, 5)),
    ]
    assert cut_to_slots(plan, 0, 0, block, 9) is None


spans = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda p: Span(p[0], sum(p)))
layers = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda p: Span(p[0], sum(p)))
blocks = st.lists(st.builds(Block, st.sampled_from("ab"), layers, spans), max_size=8)
TWO = CacheSpec(
    7,
    (
        Group("a", Paged(), (0, 1, 2, 3, 4, 5, 6), 1, (Tensor("k", DType.UINT8, 1),)),
        Group("b", Paged(), (1, 4, 5), 1, (Tensor("k", DType.UINT8, 1),)),
    ),
)


def points(some: list[Block] | tuple[Block, ...]) -> set[tuple[str, int, int]]:
    return {
        (b.group, layer, token)
        for b in some
        for layer in TWO.group(b.group).layers_in(b.layers)
        for token in range(b.tokens.first, b.tokens.end)
    }


@given(blocks)
def test_merge_keeps_coverage_without_overlap(some: list[Block]) -> None:
    some = [block for block in some if points([block])]
    merged = merge(TWO, some)
    assert points(merged) == points(some)
    assert len(points(merged)) == sum(len(points([block])) for block in merged)
    assert all(points([block]) for block in merged), "a block of nothing"
    for one, two in itertools.combinations(merged, 2):
        if (one.group, one.layers) == (two.group, two.layers):
            assert one.tokens.end < two.tokens.first or two.tokens.end < one.tokens.first


def test_layers_of_a_chunk_are_joined() -> None:
    apart = [
        Block(group, Span(layer, layer + 1), Span(at, at + 4))
        for group, numbers in [("a", (2, 0, 1)), ("b", (5, 1, 4))]
        for at in (4, 0)
        for layer in numbers
    ]
    assert merge(TWO, apart) == (
        Block("a", Span(0, 3), Span(0, 8)),
        Block("b", Span(1, 6), Span(0, 8)),
    )
    assert join_layers(TWO, apart) == (
        Block("a", Span(0, 3), Span(4, 8)),
        Block("a", Span(0, 3), Span(0, 4)),
        Block("b", Span(1, 6), Span(4, 8)),
        Block("b", Span(1, 6), Span(0, 4)),
    )


@given(blocks, layers, spans)
def test_within_is_an_intersection(some: list[Block], inside: Span, span: Span) -> None:
    clipped = within(TWO, some, inside, span)
    assert points(clipped) == {p for p in points(some) if p[1] in inside and p[2] in span}
    assert all(points([block]) for block in clipped), "a block of nothing"
    by_layers = {p for p in points(some) if p[1] in inside}
    assert points(within(TWO, some, inside)) == by_layers
