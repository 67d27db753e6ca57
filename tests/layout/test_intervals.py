"""Tests of SpanSet and cut against sets of integers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout.intervals import Span, SpanSet, cut

spans = st.tuples(st.integers(0, 20), st.integers(0, 8)).map(lambda p: Span(p[0], sum(p)))


def integers(span: Span) -> set[int]:
    return set(range(span.first, span.end))


@given(st.lists(spans, max_size=10), spans)
def test_span_set_is_a_set_of_integers(added: list[Span], asked: Span) -> None:
    have, oracle = SpanSet(), set[int]()
    for span in added:
        have.add(span)
        oracle |= integers(span)
        assert set().union(*map(integers, have.spans)) == oracle
        assert have.covers(span)
    assert all(one.end < two.first for one, two in itertools.pairwise(have.spans))
    assert all(len(span) for span in have.spans)
    assert have.covers(asked) == (integers(asked) <= oracle)


@given(st.lists(spans, max_size=8))
def test_cut_gives_the_same_integers_in_disjoint_pieces(given_spans: list[Span]) -> None:
    pieces = cut(given_spans)
    assert set().union(*map(integers, pieces)) == set().union(*map(integers, given_spans))
    assert all(one.end <= two.first for one, two in itertools.pairwise(pieces))
    for span, piece in itertools.product(given_spans, pieces):
        assert span.covers(piece) or not integers(span) & integers(piece)


def test_repr_shows_the_spans() -> None:
    have = SpanSet()
    assert repr(have) == "nothing"
    for span in (Span(4, 6), Span(0, 2), Span(2, 3)):
        have.add(span)
    assert repr(have) == "[0, 3) [4, 6)"
