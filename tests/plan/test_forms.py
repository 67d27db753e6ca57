"""Requests of one size have their form in common, and nothing that depends on their pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import RankPair, Request, Side, bind, reshard
from kvferry.plan.bind import Binding, outline
from kvferry.plan.forms import SHORT_TOKENS
from kvferry.plan.places import PageTable, contiguous_pools

SPEC = attention(layers=2, kv_heads=2, head_dim=8)
SOURCE = Layout(SPEC, Parallel(tp=2), page_tokens=4)
TARGET = Layout(SPEC, Parallel(), page_tokens=8)
PLAN, PAIR, NUM_PAGES = reshard(SOURCE, TARGET), RankPair(1, 0), SHORT_TOKENS
OURS, THEIRS = (contiguous_pools(layout, 0, NUM_PAGES).map for layout in (SOURCE, TARGET))
UNIT = 2 * 8


def tables(pages: list[int]) -> dict[str, PageTable]:
    return {SPEC.groups[0].name: PageTable(pages)}


def bound(num_tokens: int, ours: list[int], theirs: list[int]) -> Binding:
    sides = Side(OURS, tables(ours)), Side(THEIRS, tables(theirs))
    return bind(PLAN, PAIR, Request(num_tokens), *sides)


def token_by_token(num_tokens: int, ours: list[int], theirs: list[int]) -> set[tuple[int, int]]:
    """Where each token's unit is read and written in a layer: rank 1's one unit is the second."""
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


# Short, and so remembered; and too long for that.
@pytest.mark.parametrize("num_tokens", [13, SHORT_TOKENS + 3])
def test_every_request_is_bound_to_its_own_pages(num_tokens: int) -> None:
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
def test_a_form_that_is_known_vouches_for_no_page(
    ours: list[int], theirs: list[int], problem: str
) -> None:
    sketch = outline(PLAN, PAIR, Request(13), OURS, THEIRS)
    good = sketch.on(tables([4, 5, 6, 7]), tables([8, 9]))
    assert units(good) == token_by_token(13, [4, 5, 6, 7], [8, 9])
    with pytest.raises(InputError, match=problem):
        sketch.on(tables(ours), tables(theirs))


def test_a_request_of_a_single_page_is_looked_at_too() -> None:
    sketch = outline(PLAN, PAIR, Request(3), OURS, THEIRS)
    assert units(sketch.on(tables([2]), tables([1]))) == token_by_token(3, [2], [1])
    for ours, theirs in (([NUM_PAGES], [0]), ([0], [NUM_PAGES]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(InputError, match="its pool has pages"):
            sketch.on(tables(ours), tables(theirs))
