"""Tests of coverage against a set of (layer, token) pairs, added in any order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span

layers = st.tuples(st.integers(0, 6), st.integers(0, 3)).map(lambda p: Span(p[0], sum(p)))
tokens = st.tuples(st.integers(0, 9), st.integers(0, 4)).map(lambda p: Span(p[0], sum(p)))
Cells = set[tuple[int, int]]


def cells(some: Span, span: Span) -> Cells:
    return {(a, b) for a in range(some.first, some.end) for b in range(span.first, span.end)}


def in_strips(coverage: Coverage) -> Cells:
    return {
        cell for s in coverage.strips for span in s.tokens.spans for cell in cells(s.layers, span)
    }


@given(st.lists(st.tuples(layers, tokens), max_size=8), layers, tokens)
def test_coverage_is_what_was_added(added: list[tuple[Span, Span]], some: Span, span: Span) -> None:
    coverage, there = Coverage(), Cells()
    for one in added:
        coverage.add(*one)
        there |= cells(*one)
    assert in_strips(coverage) == there
    assert coverage.end == max((token + 1 for _, token in there), default=0)
    asked = cells(some, span)
    assert coverage.overlaps(some, span) == bool(asked & there)
    assert coverage.covers(some, span) == (asked <= there)
    gaps = [
        cell
        for strip in coverage.gaps(some, span)
        for gap in strip.tokens.spans
        for cell in cells(strip.layers, gap)
    ]
    assert sorted(gaps) == sorted(asked - there)


@given(st.lists(st.tuples(layers, tokens), max_size=8))
def test_adjacent_equal_strips_are_joined(added: list[tuple[Span, Span]]) -> None:
    coverage = Coverage()
    for one in added:
        coverage.add(*one)
    for below, above in itertools.pairwise(coverage.strips):
        assert below.layers.end <= above.layers.first
        alike = below.tokens.spans == above.tokens.spans
        assert below.layers.end < above.layers.first or not alike


def test_complete_chunk_is_one_strip() -> None:
    coverage = Coverage()
    for first in (0, 4):
        for layer in (3, 1, 0, 2):
            coverage.add(Span(layer, layer + 1), Span(first, first + 4))
    assert repr(coverage) == "[0, 8)"
    coverage.add(Span(0, 1), Span(8, 9))
    assert repr(coverage) == "layers [0, 1): [0, 9), layers [1, 4): [0, 8)"
    assert repr(Coverage()) == "nothing"
