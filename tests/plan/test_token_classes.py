"""Tests of token classes against membership token by token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ReasonCode, Refused
from kvferry.layout import Pattern, Span, Tokens
from kvferry.plan.token_classes import token_classes


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    period = draw(st.integers(1, 12))
    edges = sorted(draw(st.sets(st.integers(0, period), min_size=2)))
    return Pattern(period, tuple(Span(*two) for two in zip(edges[::2], edges[1::2], strict=False)))


@st.composite
def token_sets(draw: st.DrawFn) -> Tokens:
    first = draw(st.integers(0, 9))
    length = draw(st.none() | st.integers(1, 20))
    return Tokens(first, None if length is None else first + length, draw(patterns()))


@settings(deadline=None)
@given(st.lists(token_sets(), min_size=1, max_size=4))
def test_classes_partition_without_crossing_edges(sets: list[Tokens]) -> None:
    classes = token_classes(sets, "g")
    for token in range(40 + 2 * math.lcm(*(tokens.pattern.period for tokens in sets))):
        mine = [c for c in classes if token in c]
        assert len(mine) == any(token in tokens for tokens in sets)
        for one in mine:
            assert one.first in one
            assert all((token in tokens) == (one.first in tokens) for tokens in sets)


def turns(size: int, interleave: int) -> list[Tokens]:
    return [Tokens.interleaved(rank, size, interleave) for rank in range(size)]


@pytest.mark.parametrize(
    ("ours", "theirs"), [((8, 64), (8, 1)), ((3, 16), (8, 64)), ((2, 3), (5, 2))]
)
def test_two_interleaves_have_a_class_for_each_pair(
    ours: tuple[int, int], theirs: tuple[int, int]
) -> None:
    classes = token_classes([*turns(*ours), *turns(*theirs)], "g")
    assert len(classes) == ours[0] * theirs[0]


def test_equal_interleaves_have_a_class_for_each_rank() -> None:
    assert token_classes([*turns(8, 64), *turns(8, 64)], "g") == turns(8, 64)


def test_coprime_sizes_with_too_many_runs_are_refused() -> None:
    with pytest.raises(Refused) as caught:
        token_classes([*turns(255, 1), *turns(256, 1023)], "g")
    assert [reason.code for reason in caught.value.reasons] == [ReasonCode.TOO_LARGE]
