"""Contiguous pieces: what a strided block is copied in, and which pieces can be merged.

A block consists of segments, and each segment is a grid of equal pieces. So the description has a
row for each page and not for each piece. Only ``expand`` enumerates pieces, for transports that
need a descriptor for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.places import Int64s


class Stride(NamedTuple):
    """The distance in bytes between neighbouring pieces, on the source and on the target."""

    source: int
    target: int


class Pieces(NamedTuple):
    """For each segment ``rows × cols`` pieces of ``lengths`` bytes, at offsets from a layer's base.

    ``whole_pages`` says that a full page is one piece on both sides. A request's first and last
    page may be partial, and then may consist of several pieces. ``is_translated`` says that every
    piece is one element, because the two sides keep elements in different orders.
    """

    source: Int64s
    target: Int64s
    lengths: Int64s
    rows: Int64s
    cols: Int64s
    row_stride: Stride
    col_stride: Stride
    whole_pages: bool
    is_translated: bool = False

    @property
    def num_pieces(self) -> int:
        """Number of contiguous pieces."""
        if len(self.lengths) == 1:
            # Short requests have one page, and array arithmetic costs more than integers.
            return self.rows.item() * self.cols.item()
        return int(self.rows @ self.cols)

    @property
    def num_bytes(self) -> int:
        """Number of bytes to copy."""
        if len(self.lengths) == 1:
            return self.num_pieces * self.lengths.item()
        return int((self.rows * self.cols) @ self.lengths)

    @property
    def contiguous(self) -> bool:
        """Whether every page is one piece on both sides, or would be if it were full.

        The transfer mode ``runs`` requires this.
        """
        return self.whole_pages or self.num_pieces == len(self.lengths)

    def select(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Pieces:
        """Return some of the segments."""
        return self._replace(
            source=self.source[which],
            target=self.target[which],
            lengths=self.lengths[which],
            rows=self.rows[which],
            cols=self.cols[which],
        )

    def merged(self) -> Pieces:
        """Return the same bytes with segments joined that touch on both sides."""
        if len(self.lengths) < 2:
            return self
        single = (self.rows == 1) & (self.cols == 1)
        touching = (
            single[:-1]
            & single[1:]
            & (self.source[:-1] + self.lengths[:-1] == self.source[1:])
            & (self.target[:-1] + self.lengths[:-1] == self.target[1:])
        )
        starts = np.concatenate(([0], np.flatnonzero(~touching) + 1))
        return self.select(starts)._replace(lengths=np.add.reduceat(self.lengths, starts))

    def expand(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return the source offset, target offset and length of every piece."""
        counts = self.rows * self.cols
        if (counts == 1).all():
            return self.source, self.target, self.lengths
        segment = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
        row, col = np.divmod(within, self.cols[segment])
        return (
            self.source[segment] + row * self.row_stride.source + col * self.col_stride.source,
            self.target[segment] + row * self.row_stride.target + col * self.col_stride.target,
            self.lengths[segment],
        )


def one_piece(num_bytes: int) -> Pieces:
    """Return a single piece at offset 0."""
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    flat = Stride(num_bytes, num_bytes)
    return Pieces(zero, zero, one * num_bytes, one, one, flat, flat, whole_pages=True)


class Elements(NamedTuple):
    """The elements of a unit that are not contiguous on both sides: stride, number and bytes."""

    stride: Stride
    num: int
    num_bytes: int


class SegmentShape(NamedTuple):
    """The strides of a segment, whose tokens have ``num_units`` units of ``unit_bytes`` each.

    ``full_tokens`` is the length of a segment that fills a page. ``elements`` is None if units are
    contiguous on both sides.
    """

    token_stride: Stride
    unit_stride: Stride
    num_units: int
    unit_bytes: int
    full_tokens: int
    elements: Elements | None = None

    @property
    def keeps_columns(self) -> bool:
        """Whether an element's tokens are contiguous on both sides."""
        elements = self.elements
        return elements is not None and self.token_stride == (
            *(elements.num_bytes, elements.num_bytes),
        )

    @property
    def is_translated(self) -> bool:
        """Whether elements have another order on one side, so that each is a piece."""
        return self.elements is not None and not self.keeps_columns


def pieces_of(source: Int64s, target: Int64s, num_tokens: Int64s, shape: SegmentShape) -> Pieces:
    """Return the pieces of segments of ``num_tokens`` tokens, as large as both sides allow.

    ``source`` and ``target`` are the offsets of each segment's first unit. If elements are
    translated, a segment has a single unit, because its grid is one of tokens and elements.
    """
    fuse, strides = _fuse, (shape.token_stride, shape.unit_stride)
    if shape.elements is not None:
        assert shape.num_units == 1 or not shape.is_translated
        fuse = _single_elements if shape.is_translated else _columns
        other = shape.token_stride if shape.is_translated else shape.unit_stride
        strides = (other, shape.elements.stride)
    lengths, rows, cols = fuse(num_tokens, shape)
    _, full_rows, full_cols = fuse(np.array([shape.full_tokens], dtype=np.int64), shape)
    whole_pages = bool(full_rows[0] == full_cols[0] == 1)
    return Pieces(
        *(source, target, lengths, rows, cols, *strides, whole_pages),
        is_translated=shape.is_translated,
    )


def _fuse(num_tokens: Int64s, shape: SegmentShape) -> tuple[Int64s, Int64s, Int64s]:
    """Return lengths, rows and columns after fusing units, tokens, both, or neither."""
    token_stride, unit_stride, num_units, unit_bytes = shape[:4]
    one = np.ones_like(num_tokens)
    row_bytes = num_units * unit_bytes
    if num_units == 1 or unit_stride == (unit_bytes, unit_bytes):
        # A token's units are contiguous. A whole segment is one piece if its tokens are, too.
        if token_stride == (row_bytes, row_bytes):
            return num_tokens * row_bytes, one, one
        return one * row_bytes, num_tokens, one
    if token_stride == (unit_bytes, unit_bytes):
        # A unit's tokens are contiguous. Units follow without a gap only in a full page.
        column = num_tokens * unit_bytes
        dense = (column == unit_stride.source) & (column == unit_stride.target)
        return np.where(dense, num_units, 1) * column, one, np.where(dense, 1, num_units)
    return one * unit_bytes, num_tokens, one * num_units


def _single_elements(num_tokens: Int64s, shape: SegmentShape) -> tuple[Int64s, Int64s, Int64s]:
    """Return a row of single elements for each token."""
    assert shape.elements is not None
    one = np.ones_like(num_tokens)
    return one * shape.elements.num_bytes, num_tokens, one * shape.elements.num


def _columns(num_tokens: Int64s, shape: SegmentShape) -> tuple[Int64s, Int64s, Int64s]:
    """Return a row of columns for each unit, with columns fused that fill a page on both sides."""
    elements = shape.elements
    assert elements is not None
    one = np.ones_like(num_tokens)
    column = num_tokens * elements.num_bytes
    dense = (column == elements.stride.source) & (column == elements.stride.target)
    lengths = np.where(dense, elements.num, 1) * column
    return lengths, one * shape.num_units, np.where(dense, 1, elements.num)
