"""Mapping of vLLM's blocks to pages and cells."""

from __future__ import annotations

import pytest

from kvferry import InputError, Span, Tokens
from kvferry.connectors.vllm.caches import BlockGroup, CacheView, EngineShape, plan_caches
from kvferry.connectors.vllm.paging import BlockTables, Paging, PushedPages


def test_pages_may_be_smaller_than_blocks() -> None:
    paging = Paging(block_tokens=64, page_tokens=16, whole_pages=False)
    assert paging.pages([3, 1]) == [12, 13, 14, 15, 4, 5, 6, 7]
    assert paging.touched(paging.pages([3, 1]), 10, 40) == [12, 13, 14]
    with pytest.raises(InputError, match="choose another --block-size"):
        Paging(block_tokens=24, page_tokens=16, whole_pages=False)


@pytest.mark.parametrize(
    ("num_tokens", "rest"),
    [
        (64, {}),
        (128, {}),
        (1, {12: 1, 13: 0, 14: 0, 15: 0}),
        (80, {5: 0, 6: 0, 7: 0}),
        (100, {6: 4, 7: 0}),
        (127, {7: 15}),
    ],
)
def test_rest_of_the_last_block(num_tokens: int, rest: dict[int, int]) -> None:
    paging = Paging(block_tokens=64, page_tokens=16, whole_pages=False)
    assert paging.rest([3, 1], num_tokens) == rest


def test_ranks_that_share_tokens_have_some_pages_of_each_block() -> None:
    """Rank 1 of 4 holds tokens 4..7, 20..23, ..., packed into pages of 8 tokens."""
    held = Tokens.interleaved(1, 4, 4)
    paging = Paging(block_tokens=16, page_tokens=8, whole_pages=False, dcp=4, held=held)
    pages = paging.pages([3, 1])
    assert pages == [6, 7, 2, 3]
    assert paging.touched(pages, 0, 4) == []
    assert paging.touched(pages, 0, 40) == [6, 7]
    assert paging.touched(pages, 40, 90) == [7, 2]
    assert paging.rest([3, 1], 70) == {2: 2, 3: 0}
    assert paging.rest([3, 1], 66) == {2: 0, 3: 0}
    assert paging.rest([3, 1], 103) == {3: 3}
    assert paging.rest([3, 1], 120) == {}
    assert paging.rest([3, 1], 128) == {}
    assert paging.blocks_of(10, 65) == Span(0, 2)
    with pytest.raises(InputError, match="--decode-context-parallel-size"):
        Paging(block_tokens=16, page_tokens=8, whole_pages=True, dcp=4)


def tables(*, whole_pages: bool, window: int | None = None) -> BlockTables:
    """Block tables of two full-attention layers and two layers with a window."""
    view = CacheView((100, 8, 16, 128), (8 * 16 * 128, 16 * 128, 128, 1), "bfloat16")
    names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    kept = [BlockGroup(frozenset(names[:2])), BlockGroup(frozenset(names[2:]), window)]
    engine = EngineShape(1, (4,), 0, 8, 16, on_cpu=whole_pages)
    return plan_caches(dict.fromkeys(names, view), engine, kept).tables


FULL, OTHER = (f"model.layers.*.self_attn.attn {place}" for place in (0, 1))


def test_new_cells_of_each_chunk() -> None:
    pages = PushedPages(tables(whole_pages=False), 40)
    pages.extend(0, ((7, 4), (1, 2)))
    assert pages.new_cells(20, last=False) == ((0, 20), {FULL: [7, 4], OTHER: [1, 2]})
    pages.end = 20
    pages.extend(1, ((4, 9), (2, 3)))
    assert pages.new_cells(40, last=True) == ((20, 40), {FULL: [4, 9], OTHER: [2, 3]})


def test_pages_before_the_window_are_left_out() -> None:
    pages = PushedPages(tables(whole_pages=False, window=10), 60)
    pages.extend(0, ((7, 4, 5), (1, 2, 3)))
    assert pages.new_cells(48, last=False) == (
        (0, 48),
        {FULL: [7, 4, 5], OTHER: [None, None, None]},
    )
    pages = PushedPages(tables(whole_pages=False, window=16), 60)
    pages.extend(0, ((7, 4, 5), (0, 0, 3)))  # vLLM's null block, where a prefix was cached
    assert pages.new_cells(48, last=False) == ((0, 48), {FULL: [7, 4, 5], OTHER: [None, None, 3]})


def test_target_wants_only_the_window() -> None:
    blocks = ((7, 4, 5, 6), (0, 0, 3, 2))
    kept = tables(whole_pages=False, window=16)
    assert kept.wanted(blocks, 60, 0) == {FULL: [7, 4, 5, 6], OTHER: [3, 2]}
    assert kept.wanted(blocks, 60, 50) == {FULL: [6], OTHER: [2]}
    assert kept.wanted((), 60, 60) == {FULL: [], OTHER: []}


@pytest.mark.parametrize("num_tokens", range(1, 100))
def test_cpu_window_is_rounded_up_to_pages(num_tokens: int) -> None:
    """At most one page before the window's first one is owed."""
    window, group = 33, tables(whole_pages=True, window=33).groups[1]
    needed = max(0, num_tokens - window) // 16
    assert needed - 1 <= group.owed(-(-num_tokens // 16)).first <= needed


def test_cpu_page_is_pushed_when_full_or_last() -> None:
    pages = PushedPages(tables(whole_pages=True), 33)
    pages.extend(0, ((7,), (1,)))
    assert pages.new_cells(15, last=False) is None
    pages.extend(0, ((7, 4), (1, 2)))
    assert pages.new_cells(31, last=False) == ((0, 1), {FULL: [7], OTHER: [1]})
    pages.end = 1
    pages.extend(1, ((4, 9), (2, 3)))
    assert pages.new_cells(33, last=True) == ((1, 3), {FULL: [4, 9], OTHER: [2, 3]})
