"""Tests that requests of one size share a template, but nothing that depends on their pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import PagedView, RankPair, Request, bind, reshard
from kvferry.plan.bind import Binding, make_template
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.segments import MAX_CACHED_TOKENS

SPEC = attention(layers=2, kv_heads=2, head_dim=8)
SOURCE = Layout(SPEC, Parallel(tp=2), page_tokens=4)
TARGET = Layout(SPEC, Parallel(), page_tokens=8)
PLAN, PAIR, NUM_PAGES = reshard(SOURCE, TARGET), RankPair(1, 0), MAX_CACHED_TOKENS
OURS, THEIRS = (contiguous_pools(layout, 0, NUM_PAGES).map for layout in (SOURCE, TARGET))
UNIT = 2 * 8


def tables(pages: list[int]) -> dict[str, PageTable]:
    return {SPEC.groups[0].name: PageTable(pages)}


def bound(num_tokens: int, ours: list[int], theirs: list[int]) -> Binding:
    sides = PagedView(OURS, tables(ours)), PagedView(THEIRS, tables(theirs))
    return bind(PLAN, PAIR, Request(num_tokens), *sides)


def token_by_token(num_tokens: int, ours: list[int], theirs: list[int]) -> set[tuple[int, int]]:
    """Return where each token's unit is read and written. Rank 1 holds the second of two units."""
    return {
        (
            (ours[token // 4] * 4 + token % 4) * UNIT,
            (theirs[token // 8] * 8 + token % 8) * 2 * UNIT + UNIT,
        )
        for token in range(num_tokens)
    }


def units(binding: Binding) -> set[tuple[int, int]]:
    source, target, lengths = binding.parts[0].pieces.expand()
    assert np.all(lengths == UNIT)
    return set(zip(source.tolist(), target.tolist(), strict=True))


# One size whose template is cached, and one that is too long to cache.
@pytest.mark.parametrize("num_tokens", [13, MAX_CACHED_TOKENS + 3])
def test_each_request_is_bound_to_its_own_pages(num_tokens: int) -> None:
    ours, theirs = -(-num_tokens // 4), -(-num_tokens // 8)
    for first in (0, 3, 1):
        pages = list(range(first, first + ours)), list(range(first + theirs, first, -1))
        assert units(bound(num_tokens, *pages)) == token_by_token(num_tokens, *pages)


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ([0, 1, 2, NUM_PAGES], [0, 1], "its pool has pages"),
        ([0, -1, 2, 3], [0, 1], "its pool has pages"),
        ([0, 1, 2, 3], [0, NUM_PAGES], "its pool has pages"),
        ([0, 1, 2, 3], [5, 5], "twice"),
        ([0, 1, 2], [0, 1], r"needs pages 0\.\.3"),
        ([0, 1, 2, 3], [0], r"needs pages 0\.\.1"),
    ],
)
def test_template_checks_pages_on_each_use(
    ours: list[int], theirs: list[int], problem: str
) -> None:
    template = make_template(PLAN, PAIR, Request(13), OURS, THEIRS)
    good = template.bind(tables([4, 5, 6, 7]), tables([8, 9]))
    assert units(good) == token_by_token(13, [4, 5, 6, 7], [8, 9])
    with pytest.raises(InputError, match=problem):
        template.bind(tables(ours), tables(theirs))


def test_single_page_request_is_checked() -> None:
    template = make_template(PLAN, PAIR, Request(3), OURS, THEIRS)
    assert units(template.bind(tables([2]), tables([1]))) == token_by_token(3, [2], [1])
    for ours, theirs in (([NUM_PAGES], [0]), ([0], [NUM_PAGES]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(InputError, match="its pool has pages"):
            template.bind(tables(ours), tables(theirs))
