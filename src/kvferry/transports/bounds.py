"""Whether a binding stays inside the regions of both sides: the last check before bytes move.

Every segment of a part is a grid, so its lowest and highest byte follow from its
corners; the cost is one row per page and not one per piece. What is decided here
is exact: a problem is told if and only if some piece lies outside.

The GPU waits for this, so most parts are let through by a bound that takes a few
microseconds: as if every segment were as large as the largest. Only what does not pass
that is looked at segment by segment. What the regions leave to a part's layers is worked
out once and remembered (``Limits``), because layers come again with every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces
from kvferry.plan.places import Base, Int64s

# No region is that large. Sums of four numbers below it can't wrap.
_FAR = 1 << 60
# How many parts' layers are remembered.
_MAX_KNOWN = 256


class _Extent(NamedTuple):
    """Bytes relative to the base of every layer of a part: those it touches, or may touch."""

    first: int
    end: int

    def holds(self, other: _Extent) -> bool:
        """Whether the other lies inside."""
        return self.first <= other.first and other.end <= self.end


# What layers in unknown regions leave.
_NOTHING = _Extent(1, 0)


class Limits:
    """The sizes of one side's regions, and how far around their bases parts may reach.

    Several threads may ask at once: what is remembered is never changed, only forgotten.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._known: dict[tuple[Base, Base], tuple[tuple[Base, ...], _Extent]] = {}

    def around(self, bases: tuple[Base, ...]) -> _Extent:
        """What may be touched around each of these bases; nothing if a region is unknown."""
        # Comparing is quick, for it is mostly the very same bases; hashing all would not be.
        key = bases[0], bases[-1]
        known = self._known.get(key)
        if known is not None and known[0] == bases:
            return known[1]
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        extent = self._around(bases)
        self._known[key] = bases, extent
        return extent

    def _around(self, bases: tuple[Base, ...]) -> _Extent:
        if any(not 0 <= base.region < len(self.sizes) for base in bases):
            return _NOTHING
        first = -min(base.offset for base in bases)
        return _Extent(first, min(self.sizes[base.region] - base.offset for base in bases))


def problem(
    binding: Binding, sources: Limits | Sequence[int], targets: Limits | Sequence[int]
) -> str | None:
    """Name a piece that lies outside the regions of those sizes; None if there is none."""
    ours = sources if isinstance(sources, Limits) else Limits(sources)
    theirs = targets if isinstance(targets, Limits) else Limits(targets)
    last: Pieces | None = None
    rough: tuple[_Extent, _Extent] | None = None
    for part in binding.parts:
        # K and V often have the very same pieces.
        if part.pieces is not last:
            last, rough = part.pieces, _rough(part.pieces)
        passes = (
            rough is not None
            and part.source_bases
            and part.target_bases
            and ours.around(part.source_bases).holds(rough[0])
            and theirs.around(part.target_bases).holds(rough[1])
        )
        if not passes:
            found = _exactly(part, ours.sizes, theirs.sizes)
            if found:
                return found
    return None


def _rough(pieces: Pieces) -> tuple[_Extent, _Extent] | None:
    """Bounds of what is touched on either side; None where only a closer look can tell."""
    if not len(pieces.lengths):
        return None
    lowest, highest = _ranges(pieces)
    source, target, length, rows, cols = lowest
    if length < 0 or rows < 1 or cols < 1:
        return None
    last_source, last_target, longest, most_rows, most_cols = highest
    # Python's own numbers, which can't wrap.
    strides = zip(pieces.row_stride, pieces.col_stride, strict=True)
    reaches = [((most_rows - 1) * row, (most_cols - 1) * col) for row, col in strides]
    begins, ends = (source, target), (last_source, last_target)
    ours, theirs = (
        _Extent(
            begin + sum(step for step in reach if step < 0),
            end + longest + sum(step for step in reach if step > 0),
        )
        for begin, end, reach in zip(begins, ends, reaches, strict=True)
    )
    return ours, theirs


def _ranges(pieces: Pieces) -> tuple[list[int], list[int]]:
    """The lowest and the highest of sources, targets, lengths, rows and columns."""
    if len(pieces.lengths) == 1:
        only = [column.item() for column in pieces[:5]]
        return only, only
    columns = np.array(pieces[:5])
    return columns.min(axis=1).tolist(), columns.max(axis=1).tolist()


# ---------------------------------------------------------------- segment by segment


def _exactly(
    part: BindingPart, source_sizes: Sequence[int], target_sizes: Sequence[int]
) -> str | None:
    pieces = _with_pieces(part.pieces)
    if not len(pieces.lengths):
        return None
    strides = (pieces.row_stride, pieces.col_stride)
    ours = _extent(pieces, pieces.source, [stride.source for stride in strides])
    theirs = _extent(pieces, pieces.target, [stride.target for stride in strides])
    return _outside(part, "source", part.source_bases, ours, source_sizes) or _outside(
        part, "target", part.target_bases, theirs, target_sizes
    )


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
    part: BindingPart,
    side: str,
    bases: Sequence[Base],
    extent: _Extent | None,
    sizes: Sequence[int],
) -> str | None:
    for base in bases:
        problem = _base_problem(base, side, extent, sizes)
        if problem:
            return f"{part.group}.{part.tensor} of layer {base.layer} {problem}"
    return None


def _base_problem(
    base: Base, side: str, extent: _Extent | None, sizes: Sequence[int]
) -> str | None:
    if not 0 <= base.region < len(sizes):
        return f"names region {base.region} of the {side}, which has {len(sizes)}"
    if extent is None:
        return f"has {side} offsets, strides or lengths that no region can hold"
    size, first, end = sizes[base.region], base.offset + extent.first, base.offset + extent.end
    if first < 0 or end > size:
        return f"takes the bytes {first} to {end} of {side} region {base.region}, which has {size}"
    return None
