"""The bounds check, compared with a check of every single piece."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.testing.transports import PlacedPiece, binding_of
from kvferry.transports.bounds import RegionBounds, find_violation

NUM_REGIONS = 3


def pieces_of(
    segments: list[tuple[int, int, int, int, int]],
    row_stride: tuple[int, int],
    col_stride: tuple[int, int],
) -> Pieces:
    columns = np.array(segments, dtype=np.int64).reshape(-1, 5).T
    source, target, lengths, rows, cols = columns
    strides = (Stride(*row_stride), Stride(*col_stride))
    return Pieces(source, target, lengths, rows, cols, *strides, whole_pages=False)


@st.composite
def parts(draw: st.DrawFn, *, inside: bool) -> BindingPart:
    """Pieces anywhere, or only in existing regions and at non-negative offsets."""
    least = 0 if inside else -8
    offsets = st.integers(max(least, -2), 60)
    strides = st.tuples(*[st.integers(least, 20)] * 2)
    segments = st.tuples(offsets, offsets, st.integers(0, 12), *[st.integers(0, 4)] * 2)
    regions = st.integers(0, NUM_REGIONS - 1)
    if not inside:
        regions |= st.sampled_from([-1, NUM_REGIONS])
    bases = st.builds(Base, st.integers(0, 9), regions, offsets)
    num_layers = draw(st.integers(1, 3))
    source, target = (draw(st.tuples(*[bases] * num_layers)) for _ in range(2))
    pieces = pieces_of(draw(st.lists(segments, max_size=4)), draw(strides), draw(strides))
    return BindingPart("g", "t", source, target, pieces)


def bindings(*, inside: bool) -> st.SearchStrategy[Binding]:
    return st.builds(Binding, st.lists(parts(inside=inside), max_size=3).map(tuple))


sizes = st.lists(st.integers(0, 160), min_size=NUM_REGIONS, max_size=NUM_REGIONS)


def violation(binding: Binding, sources: list[int], targets: list[int]) -> str | None:
    return find_violation(binding, RegionBounds(sources), RegionBounds(targets))


def by_definition(binding: Binding, sources: list[int], targets: list[int]) -> bool:
    """Return whether each piece lies in its regions, checked one by one."""

    def inside(region: int, offset: int, length: int, sizes: list[int]) -> bool:
        known = 0 <= region < len(sizes)
        return known and offset >= 0 and offset + length <= sizes[region]

    return all(
        inside(source, at, length, sources) and inside(target, to, length, targets)
        for source, at, target, to, length in zip(*binding.descriptors(), strict=True)
    )


@settings(max_examples=300, deadline=None)
@given(bindings(inside=False) | bindings(inside=True), sizes, sizes)
def test_a_violation_is_reported_exactly_if_a_piece_lies_outside(
    binding: Binding, sources: list[int], targets: list[int]
) -> None:
    passes = violation(binding, sources, targets) is None
    assert passes == by_definition(binding, sources, targets)


@settings(max_examples=100, deadline=None)
@given(st.lists(bindings(inside=False) | bindings(inside=True), max_size=6), sizes, sizes)
def test_the_cache_of_layers_does_not_change_the_result(
    several: list[Binding], sources: list[int], targets: list[int]
) -> None:
    """Check many bindings, some with common bases, against the same ``RegionBounds``."""
    ours, theirs = RegionBounds(sources), RegionBounds(targets)
    for binding in several:
        assert find_violation(binding, ours, theirs) == violation(binding, sources, targets)


def test_layers_with_the_same_first_and_last_base_are_distinguished() -> None:
    """Only the base in the middle reaches outside."""
    narrow, wide = RegionBounds([100, 10]), RegionBounds([1 << 40])
    pieces = pieces_of([(0, 0, 20, 1, 1)], (0, 0), (0, 0))
    first, last = Base(0, 0, 0), Base(2, 0, 40)
    for middle, good in ((Base(1, 0, 20), True), (Base(1, 1, 0), False), (Base(1, 0, 20), True)):
        bases = (first, middle, last)
        part = BindingPart("g", "t", tuple(Base(i, 0, 0) for i in range(3)), bases, pieces)
        assert (find_violation(Binding((part,)), wide, narrow) is None) == good


@settings(max_examples=200, deadline=None)
@given(bindings(inside=True))
def test_the_smallest_sufficient_regions_pass(binding: Binding) -> None:
    """One byte less fails."""
    named = binding.descriptors()
    need = [[0] * NUM_REGIONS, [0] * NUM_REGIONS]
    for source, at, target, to, length in zip(*named, strict=True):
        need[0][source] = max(need[0][source], int(at + length))
        need[1][target] = max(need[1][target], int(to + length))
    assert violation(binding, *need) is None
    for side in range(2):
        for region in (region for region in range(NUM_REGIONS) if need[side][region]):
            less = [list(sizes) for sizes in need]
            less[side][region] -= 1
            assert violation(binding, *less) is not None


@pytest.mark.parametrize(
    ("piece", "sentence"),
    [
        (
            PlacedPiece(0, 90, 20),
            "raw.piece0 of layer 0 takes the bytes 90 to 110 of target region 0, which has 100",
        ),
        (
            PlacedPiece(-1, 0, 1),
            "raw.piece0 of layer 0 takes the bytes -1 to 0 of source region 0, which has 100",
        ),
        (
            PlacedPiece(0, 0, 1, source_region=4),
            "raw.piece0 of layer 0 names region 4 of the source, which has 1",
        ),
        (
            PlacedPiece(0, (1 << 63) - 1, 1),
            "raw.piece0 of layer 0 has target offsets, strides or lengths that no region can hold",
        ),
        (
            PlacedPiece(0, 0, -1),
            "raw.piece0 of layer 0 has source offsets, strides or lengths that no region can hold",
        ),
    ],
)
def test_message_names_the_violation(piece: PlacedPiece, sentence: str) -> None:
    assert violation(binding_of([piece]), [100], [100]) == sentence


@pytest.mark.parametrize(
    ("segment", "stride"),
    [
        ((0, 0, 1, 1 << 32, 1), (0, 1 << 32)),
        ((0, 0, 1, (1 << 62) + 1, 1), (0, 4)),
        ((0, 0, 1 << 62, 1, 1), (0, 0)),
        ((0, (1 << 63) - 1, (1 << 63) - 1, 2, 1), (0, (1 << 63) - 1)),
        ((-(1 << 63), 0, 1, 1, 1), (0, 0)),
    ],
)
def test_sums_that_overflow_are_outside(
    segment: tuple[int, int, int, int, int], stride: tuple[int, int]
) -> None:
    """In 64 bits these sums wrap to nearly zero."""
    pieces = pieces_of([segment], stride, (0, 0))
    binding = Binding((BindingPart("g", "t", (Base(0, 0, 0),), (Base(0, 0, 0),), pieces),))
    assert violation(binding, [1 << 40], [1 << 40]) is not None


def test_cost_is_per_page_not_per_piece() -> None:
    """A billion pieces in a thousand pages."""
    pieces = pieces_of([(0, 0, 1, 1 << 15, 1 << 15)] * 1000, (1 << 15, 1 << 15), (1, 1))
    binding = Binding((BindingPart("g", "t", (Base(0, 0, 0),), (Base(0, 0, 0),), pieces),))
    start = time.perf_counter()
    assert violation(binding, [1 << 30], [1 << 30]) is None
    assert time.perf_counter() - start < 1
