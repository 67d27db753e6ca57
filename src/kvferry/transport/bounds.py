"""Whether a binding stays inside the regions of both sides: the last check before bytes move.

Every segment of a part is a grid, so its lowest and highest byte follow from its
corners; the cost is one row per page and not one per piece. What is decided here
is exact: a problem is told if and only if some piece lies outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.plan.bind import Binding, Part
from kvferry.plan.coalesce import Pieces
from kvferry.plan.places import Base, Int64s

# No region is that large. Sums of four numbers below it can't wrap.
_FAR = 1 << 60


class _Extent(NamedTuple):
    """The bytes that a part touches, relative to the base of each of its layers."""

    first: int
    end: int


def problem(
    binding: Binding, source_sizes: Sequence[int], target_sizes: Sequence[int]
) -> str | None:
    """Name a piece that lies outside the regions of those sizes; None if there is none."""
    for part in binding.parts:
        pieces = _with_pieces(part.pieces)
        if not len(pieces.lengths):
            continue
        strides = (pieces.row_stride, pieces.col_stride)
        ours = _extent(pieces, pieces.source, [stride.source for stride in strides])
        theirs = _extent(pieces, pieces.target, [stride.target for stride in strides])
        found = _outside(part, "source", part.source_bases, ours, source_sizes) or _outside(
            part, "target", part.target_bases, theirs, target_sizes
        )
        if found:
            return found
    return None


def _with_pieces(pieces: Pieces) -> Pieces:
    """Only the segments that have any."""
    some = (pieces.rows > 0) & (pieces.cols > 0)
    if some.all():
        return pieces
    columns = ("source", "target", "lengths", "rows", "cols")
    return pieces._replace(**{name: getattr(pieces, name)[some] for name in columns})


def _extent(pieces: Pieces, offsets: Int64s, strides: Sequence[int]) -> _Extent | None:
    """From the lowest to the highest byte of all segments; None if no region is that large."""
    steps = (pieces.rows - 1, pieces.cols - 1)
    reaches = [int(count.max()) * abs(by) for count, by in zip(steps, strides, strict=True)]
    extremes = [abs(int(end)) for array in (offsets, pieces.lengths) for end in _ends(array)]
    if max(*reaches, *extremes) >= _FAR or pieces.lengths.min() < 0:
        return None
    first, last = offsets, offsets + pieces.lengths
    for count, by in zip(steps, strides, strict=True):
        if by < 0:
            first = first + count * by
        else:
            last = last + count * by
    return _Extent(int(first.min()), int(last.max()))


def _ends(array: Int64s) -> tuple[np.int64, np.int64]:
    return array.min(), array.max()


def _outside(
    part: Part, side: str, bases: Sequence[Base], extent: _Extent | None, sizes: Sequence[int]
) -> str | None:
    for base in bases:
        what = f"{part.group}.{part.tensor} of layer {base.layer}"
        if not 0 <= base.region < len(sizes):
            return f"{what} names region {base.region} of the {side}, which has {len(sizes)}"
        size = sizes[base.region]
        if extent is None:
            return f"{what} has {side} offsets, strides or lengths that no region can hold"
        first, end = base.offset + extent.first, base.offset + extent.end
        if first < 0 or end > size:
            return (
                f"{what} takes the bytes {first} to {end} of {side} region {base.region}, "
                f"which has {size}"
            )
    return None
