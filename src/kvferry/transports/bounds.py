"""Check that a binding stays inside the regions of both sides, the last check before bytes move.

Every segment of a part is a grid, so its corners give its lowest and highest byte. The check costs
one row per page, not per piece, and is exact: it reports a violation if and only if some piece
lies outside.

The check is on the critical path of a GPU transfer. Most parts pass a conservative test that takes
a few microseconds and treats every segment as if it were as large as the largest. Only parts that
fail it are checked segment by segment. The space that regions leave around the bases of a part's
layers is cached (``RegionBounds``), because the same layers come with every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces
from kvferry.plan.places import Base, Int64s

# Larger than any region. Sums of four numbers below it do not overflow 64 bits.
_TOO_LARGE = 1 << 60
_MAX_CACHED = 256


class _ByteRange(NamedTuple):
    """A range of bytes relative to the base of each layer of a part."""

    first: int
    end: int

    def contains(self, other: _ByteRange) -> bool:
        return self.first <= other.first and other.end <= self.end


_EMPTY = _ByteRange(1, 0)


class RegionBounds:
    """The sizes of one side's regions, and the space they leave around the bases of parts.

    Several threads may use it at once: cache entries are never changed, only dropped.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._cache: dict[tuple[Base, Base], tuple[tuple[Base, ...], _ByteRange]] = {}

    def around(self, bases: tuple[Base, ...]) -> _ByteRange:
        """Return the range that may be touched around every base; empty for an unknown region."""
        # Comparing is fast, since the bases are usually the same objects. Hashing all is not.
        key = bases[0], bases[-1]
        cached = self._cache.get(key)
        if cached is not None and cached[0] == bases:
            return cached[1]
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        space = self._space_around(bases)
        self._cache[key] = bases, space
        return space

    def _space_around(self, bases: tuple[Base, ...]) -> _ByteRange:
        if any(not 0 <= base.region < len(self.sizes) for base in bases):
            return _EMPTY
        first = -min(base.offset for base in bases)
        return _ByteRange(first, min(self.sizes[base.region] - base.offset for base in bases))


def find_violation(binding: Binding, source: RegionBounds, target: RegionBounds) -> str | None:
    """Describe a piece that lies outside the regions of its side; None if there is none."""
    last: Pieces | None = None
    touched: tuple[_ByteRange, _ByteRange] | None = None
    for part in binding.parts:
        # K and V often share one ``Pieces`` object.
        if part.pieces is not last:
            last, touched = part.pieces, _touched_at_most(part.pieces)
        passes = (
            touched is not None
            and part.source_bases
            and part.target_bases
            and source.around(part.source_bases).contains(touched[0])
            and target.around(part.target_bases).contains(touched[1])
        )
        if not passes:
            violation = _check_segments(part, source.sizes, target.sizes)
            if violation:
                return violation
    return None


def _touched_at_most(pieces: Pieces) -> tuple[_ByteRange, _ByteRange] | None:
    """Return ranges that contain all bytes touched on either side; None if unknown."""
    if not len(pieces.lengths):
        return None
    lowest, highest = _extremes(pieces)
    source, target, length, rows, cols = lowest
    if length < 0 or rows < 1 or cols < 1:
        return None
    last_source, last_target, longest, most_rows, most_cols = highest
    # Python integers, which do not overflow.
    strides = zip(pieces.row_stride, pieces.col_stride, strict=True)
    reaches = [((most_rows - 1) * row, (most_cols - 1) * col) for row, col in strides]
    firsts, lasts = (source, target), (last_source, last_target)
    ours, theirs = (
        _ByteRange(
            first + sum(step for step in reach if step < 0),
            last + longest + sum(step for step in reach if step > 0),
        )
        for first, last, reach in zip(firsts, lasts, reaches, strict=True)
    )
    return ours, theirs


def _extremes(pieces: Pieces) -> tuple[list[int], list[int]]:
    """Return the lowest and highest of sources, targets, lengths, rows and columns."""
    if len(pieces.lengths) == 1:
        only = [column.item() for column in pieces[:5]]
        return only, only
    columns = np.array(pieces[:5])
    return columns.min(axis=1).tolist(), columns.max(axis=1).tolist()


# ---------------------------------------------------------------- exact, segment by segment


def _check_segments(
    part: BindingPart, source_sizes: Sequence[int], target_sizes: Sequence[int]
) -> str | None:
    pieces = _without_empty(part.pieces)
    if not len(pieces.lengths):
        return None
    sides = (
        ("source", part.source_bases, pieces.source, source_sizes),
        ("target", part.target_bases, pieces.target, target_sizes),
    )
    strides = zip(pieces.row_stride, pieces.col_stride, strict=True)
    for (side, bases, offsets, sizes), steps in zip(sides, strides, strict=True):
        touched = _touched(pieces, offsets, steps)
        for base in bases:
            problem = _base_problem(base, side, touched, sizes)
            if problem:
                return f"{part.group}.{part.tensor} of layer {base.layer} {problem}"
    return None


def _without_empty(pieces: Pieces) -> Pieces:
    """Drop segments without pieces."""
    some = (pieces.rows > 0) & (pieces.cols > 0)
    return pieces if some.all() else pieces.select(some)


def _touched(pieces: Pieces, offsets: Int64s, strides: Sequence[int]) -> _ByteRange | None:
    """Return the range from the lowest to the highest byte; None if no region is that large."""
    counts = (pieces.rows - 1, pieces.cols - 1)
    reaches = [int(count.max()) * abs(by) for count, by in zip(counts, strides, strict=True)]
    ends = (offsets.min(), offsets.max(), pieces.lengths.min(), pieces.lengths.max())
    if max(*reaches, *(abs(int(end)) for end in ends)) >= _TOO_LARGE or pieces.lengths.min() < 0:
        return None
    first, end = offsets, offsets + pieces.lengths
    for count, by in zip(counts, strides, strict=True):
        if by < 0:
            first = first + count * by
        else:
            end = end + count * by
    return _ByteRange(int(first.min()), int(end.max()))


def _base_problem(
    base: Base, side: str, touched: _ByteRange | None, sizes: Sequence[int]
) -> str | None:
    if not 0 <= base.region < len(sizes):
        return f"names region {base.region} of the {side}, which has {len(sizes)}"
    if touched is None:
        return f"has {side} offsets, strides or lengths that no region can hold"
    size, first, end = sizes[base.region], base.offset + touched.first, base.offset + touched.end
    if first < 0 or end > size:
        return f"takes the bytes {first} to {end} of {side} region {base.region}, which has {size}"
    return None
