"""Tests of context parallelism: any size and interleave to any other, token by token.

Each token's entry is its number. A rank's pages are filled from the definition of an interleave:
rank ``r`` of ``c`` keeps the tokens with ``t // k % c == r``, packed in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import assert_exactly_once

from kvferry.layout import (
    CacheSpec,
    DType,
    Group,
    Layout,
    Paged,
    Parallel,
    Span,
    StateRow,
    Tensor,
    Window,
)
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import (
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    StagingView,
    bind,
    check,
    contiguous_pools,
    reshard,
)

Words = NDArray[np.uint32]

SIZES = [1, 2, 3, 8]
INTERLEAVES = [1, 16, 64]
# One rank needs no interleave.
SHARES = [(1, 1), *itertools.product(SIZES[1:], INTERLEAVES)]
WORD = Tensor("word", DType.FLOAT32, 1)
LATENT = CacheSpec(1, (Group("kv", Paged(), (0,), 1, (WORD,)),))
# A model with one KV head, windows, and recurrent state in other layers.
HYBRID = CacheSpec(
    3,
    (
        Group("kv", Paged(), (0,), 1, (WORD, Tensor("v", DType.FLOAT16, 3))),
        Group("window", Window(50), (2,), 1, (WORD,)),
        Group("state", StateRow(), (1,), 24, (Tensor("s", DType.UINT8, 2),)),
    ),
)


def parallel(size: int, interleave: int, *, inside: bool) -> Parallel:
    """Return ranks that share the tokens: TP ranks, or ranks beside a TP group of one."""
    if inside:
        return Parallel(tp=size, dcp=size, interleave=interleave)
    return Parallel(cp=size, interleave=interleave)


def lengths(one: tuple[int, int], two: tuple[int, int]) -> list[int]:
    """Return 1, three rounds of the longer turn, and lengths around every border between."""
    longest = max(one[0] * one[1], two[0] * two[1])
    borders = {interleave * n for size, interleave in (one, two) for n in (1, size, 2 * size)}
    near = {border + off for border in borders for off in (-1, 0, 1)} | {1, 3 * longest - 5}
    return [*sorted(n for n in near if 0 < n <= 3 * longest), 3 * longest]


@pytest.mark.parametrize("source", SHARES)
@pytest.mark.parametrize("target", SHARES)
def test_every_pair_covers_every_token_once(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    sides = parallel(*source, inside=True), parallel(*target, inside=False)
    plan = reshard(*(Layout(HYBRID, side) for side in sides))
    check(plan)
    for num_tokens in lengths(source, target):
        assert_exactly_once(plan, Request(num_tokens))
        assert_exactly_once(plan, Request(num_tokens, num_tokens // 3))


# ---------------------------------------------------------------- the words in pages


class WordPools:
    """One rank's pages of words. The word of token ``t`` is ``t + 1``, and 0 elsewhere."""

    def __init__(self, layout: Layout, rank: int, num_tokens: int, seed: int) -> None:
        sharding = layout.sharding
        assert isinstance(sharding, Parallel)
        size, interleave = sharding.cp * sharding.dcp, sharding.interleave
        turn = rank % size
        self.mine = [t for t in range(num_tokens) if t // interleave % size == turn]
        num_pages = num_tokens // layout.page_tokens + 2
        self.table = np.random.default_rng([seed, rank]).permutation(num_pages)
        self.words: Words = np.zeros((num_pages, layout.page_tokens), dtype=np.uint32)
        pools = contiguous_pools(layout, rank, num_pages)
        self.view = PagedView(pools.map, {"kv": PageTable(self.table)})

    def filled(self, tokens: range) -> Words:
        """Return the words with those of some tokens in place."""
        words = self.words.copy()
        page_tokens = words.shape[1]
        for local, token in enumerate(self.mine):
            if token in tokens:
                words[self.table[local // page_tokens], local % page_tokens] = token + 1
        return words


def pools_of(layout: Layout, num_tokens: int, seed: int) -> list[WordPools]:
    return [WordPools(layout, rank, num_tokens, seed) for rank in range(layout.num_ranks)]


def as_bytes(words: Words) -> list[NDArray[np.uint8]]:
    return [words.reshape(-1).view(np.uint8)]


def carry(
    plan: Plan,
    request: Request,
    sources: list[WordPools],
    targets: list[WordPools],
    edges: list[int],
    *,
    staged: bool,
) -> None:
    """Carry a request chunk by chunk between all ranks."""
    everything = range(request.num_tokens)
    held = [as_bytes(source.filled(everything)) for source in sources]
    for number, target in itertools.product(range(len(sources)), range(len(targets))):
        pair = RankPair(number, target)
        ends = sources[number].view, targets[target].view
        into = as_bytes(targets[target].words)
        for tokens in itertools.starmap(Span, itertools.pairwise(edges)):
            blocks = [
                type(block)(block.group, block.layers, block.tokens.intersect(tokens))
                for block in plan.blocks(*pair, request)
            ]
            if not staged:
                copy_pieces(
                    bind(plan, pair, request, *ends, blocks).descriptors(), held[number], into
                )
                continue
            gather = bind(plan, pair, request, ends[0], StagingView(), blocks)
            slot = [np.zeros(gather.num_bytes, dtype=np.uint8)]
            copy_pieces(gather.descriptors(), held[number], slot)
            scatter = bind(plan, pair, request, StagingView(), ends[1], blocks)
            assert scatter.num_bytes == gather.num_bytes
            copy_pieces(scatter.descriptors(), slot, into)


def assert_carried(
    plan: Plan, request: Request, cuts: set[int] | None = None, *, staged: bool = False
) -> None:
    num_tokens = request.num_tokens
    sources, targets = (pools_of(layout, num_tokens, seed)
                        for seed, layout in enumerate((plan.source, plan.target)))  # fmt: skip
    edges = [0, *sorted(cut for cut in cuts or () if 0 < cut < num_tokens), num_tokens]
    carry(plan, request, sources, targets, edges, staged=staged)
    for target in targets:
        wanted = target.filled(range(request.prefix, num_tokens))
        np.testing.assert_array_equal(target.words, wanted)


def word_plan(
    source: tuple[int, int], target: tuple[int, int], pages: tuple[int, int], *, inside: bool
) -> Plan:
    sides = parallel(*source, inside=inside), parallel(*target, inside=not inside)
    return reshard(
        *(Layout(LATENT, side, page_tokens=page) for side, page in zip(sides, pages, strict=True))
    )


def some_pages() -> Iterator[tuple[int, int]]:
    yield from itertools.cycle([(16, 16), (16, 64), (64, 16), (64, 64), (1, 16), (24, 10)])


@pytest.mark.parametrize("source", SHARES)
def test_every_word_arrives(source: tuple[int, int]) -> None:
    for target, pages in zip(SHARES, some_pages(), strict=False):
        plan = word_plan(source, target, pages, inside=source[0] == 8)
        longest = 3 * max(source[0] * source[1], target[0] * target[1])
        assert_carried(plan, Request(longest))
        shorter = Request(max(1, longest - 7), max(1, longest - 7) // 3)
        assert_carried(plan, shorter, {17, longest // 2}, staged=True)


shares = st.tuples(st.integers(1, 9), st.sampled_from([1, 1, 2, 3, 5, 8, 16, 64]))


@settings(max_examples=150, deadline=None)
@given(
    shares,
    shares,
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 400),
    st.integers(0, 400),
    st.sets(st.integers(1, 399), max_size=3),
    st.booleans(),
)
def test_any_share_to_any_share(
    source: tuple[int, int],
    target: tuple[int, int],
    pages: tuple[int, int],
    num_tokens: int,
    prefix: int,
    cuts: set[int],
    staged: bool,
) -> None:
    plan = word_plan(source, target, pages, inside=bool(prefix % 2))
    check(plan)
    assert_carried(plan, Request(num_tokens, min(prefix, num_tokens)), cuts, staged=staged)


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("num_tokens", [1 << 14, 1 << 17])
def test_segments_follow_pages_and_not_tokens(interleave: int, num_tokens: int) -> None:
    source = Layout(LATENT, Parallel(tp=8, dcp=8, interleave=interleave), page_tokens=64)
    target = Layout(LATENT, Parallel(tp=2), page_tokens=64)
    plan = reshard(source, target)
    num_pages = num_tokens // 64
    ours, theirs = (
        PagedView(
            contiguous_pools(layout, 0, num_pages).map, {"kv": PageTable(np.arange(num_pages))}
        )
        for layout in (source, target)
    )
    (part,) = bind(plan, RankPair(0, 0), Request(num_tokens), ours, theirs).parts
    # A page of the source is 8 pages of the target.
    assert len(part.pieces.lengths) <= num_pages
    assert part.pieces.num_bytes == num_tokens // 8 // 2 * 4 * 2


def test_a_plan_is_no_larger_for_more_tokens_or_a_longer_interleave() -> None:
    target = Layout(LATENT, Parallel(tp=2))
    moves = {
        interleave: reshard(Layout(LATENT, Parallel(cp=8, interleave=interleave)), target).moves
        for interleave in (1, 64, 4096)
    }
    assert {len(its) for its in moves.values()} == {16}
