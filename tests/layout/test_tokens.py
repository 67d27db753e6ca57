"""Tests of patterns and token sets against sets of integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import ALL_TOKENS, EVERY, Pattern, Span, Tokens

FAR = 100


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    period = draw(st.integers(1, 12))
    edges = sorted(draw(st.sets(st.integers(0, period), min_size=2)))
    return Pattern(period, tuple(Span(*two) for two in zip(edges[::2], edges[1::2], strict=False)))


@st.composite
def token_sets(draw: st.DrawFn) -> Tokens:
    first = draw(st.integers(0, 9))
    end = draw(st.none() | st.integers(first, FAR))
    return Tokens(first, end, draw(patterns()))


def members(pattern: Pattern, end: int = FAR) -> list[int]:
    """Return the members below ``end`` from the definition."""
    return [
        token
        for token in range(end)
        if any(run.first <= token % pattern.period < run.end for run in pattern.runs)
    ]


@settings(deadline=None)
@given(patterns(), st.integers(0, FAR))
def test_a_pattern_counts_and_finds_its_members(pattern: Pattern, token: int) -> None:
    mine = members(pattern)
    assert pattern.below(token) == len([one for one in mine if one < token])
    assert (token in pattern) == (token in members(pattern, FAR + 1))
    assert [pattern.member(index) for index in range(len(mine))] == mine
    assert pattern.count(3, 3 + token) == len(
        [t for t in members(pattern, 2 * FAR) if 3 <= t < 3 + token]
    )


@settings(deadline=None)
@given(patterns(), st.integers(0, 40))
def test_a_bound_on_the_members_of_a_stretch(pattern: Pattern, length: int) -> None:
    most = max(pattern.count(first, first + length) for first in range(pattern.period))
    assert most <= pattern.most_in(length) <= pattern.density * (-(-length // pattern.period))


@settings(deadline=None)
@given(patterns(), st.integers(0, 30))
def test_shifting_moves_the_members(pattern: Pattern, by: int) -> None:
    moved = members(pattern.shifted(by))
    assert moved == [token - by for token in members(pattern, FAR + by) if token >= by]


@settings(deadline=None)
@given(patterns(), st.integers(1, 4))
def test_the_shortest_form_is_found_again(pattern: Pattern, times: int) -> None:
    longer = pattern.repeated(pattern.period * times)
    assert members(longer) == members(pattern)
    assert longer.period == pattern.period * times
    short = Pattern.of(longer.period, longer.runs)
    assert members(short) == members(pattern)
    assert short == Pattern.of(pattern.period, pattern.runs)
    assert not any(
        members(pattern) == [t for t in range(FAR) if t % period in members(pattern, period)]
        for period in range(1, short.period)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_ranks_take_turns(size: int, interleave: int) -> None:
    for rank in range(size):
        mine = Tokens.interleaved(rank, size, interleave)
        wanted = [token for token in range(FAR) if token // interleave % size == rank]
        assert [token for token in range(FAR) if token in mine] == wanted
        assert all(mine.local_index(token) == index for index, token in enumerate(wanted))
    assert Tokens.interleaved(0, 1, interleave) == ALL_TOKENS
    assert ALL_TOKENS.pattern == EVERY


@settings(deadline=None)
@given(token_sets(), st.integers(0, FAR), st.integers(0, FAR))
def test_a_clipped_set_is_tight(tokens: Tokens, one: int, two: int) -> None:
    span = Span(*sorted((one, two)))
    wanted = [token for token in range(span.first, span.end) if token in tokens]
    clipped = tokens.clip(span)
    assert clipped.num_tokens == len(wanted)
    assert clipped.clip(span) == clipped
    if wanted:
        assert (clipped.first, clipped.last, clipped.end) == (wanted[0], wanted[-1], wanted[-1] + 1)
        counted = clipped.counted()
        assert [t for t in range(FAR) if t in counted] == [t - wanted[0] for t in wanted]


@settings(deadline=None)
@given(patterns(), patterns())
def test_common_members_of_two_patterns(one: Pattern, two: Pattern) -> None:
    both = one.intersect(two)
    wanted = [token for token in members(one, 300) if token in two]
    assert (members(both, 300) if both else []) == wanted
