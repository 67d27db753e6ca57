"""Contiguous pieces: how a strided block falls apart, and what can be merged.

A block is described by segments. Each segment is a grid of equal pieces, so
the description costs one row per page and not one per piece; ``expand`` is the
only function that enumerates pieces, for transports that need every one named.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvferry.plan.places import Int64s


class Stride(NamedTuple):
    """The distance between neighbours, in bytes, on either side."""

    source: int
    target: int


class Pieces(NamedTuple):
    """Per segment, ``rows × cols`` pieces of ``lengths`` bytes, relative to a layer's base.

    ``whole_pages``: a full page is one piece on both sides. A request's first
    and last page need not be full, and may fall apart where the others do not.
    """

    source: Int64s
    target: Int64s
    lengths: Int64s
    rows: Int64s
    cols: Int64s
    row_stride: Stride
    col_stride: Stride
    whole_pages: bool

    @property
    def num_pieces(self) -> int:
        """How many contiguous pieces there are."""
        if len(self.lengths) == 1:
            # Short requests lie in one page, and arrays cost more than numbers.
            return self.rows.item() * self.cols.item()
        return int(self.rows @ self.cols)

    @property
    def num_bytes(self) -> int:
        """The payload."""
        if len(self.lengths) == 1:
            return self.num_pieces * self.lengths.item()
        return int((self.rows * self.cols) @ self.lengths)

    @property
    def contiguous(self) -> bool:
        """Whether every page is one piece on both sides, or would be if it were full.

        This is the condition for runs.
        """
        return self.whole_pages or self.num_pieces == len(self.lengths)

    def merged(self) -> Pieces:
        """Join neighbouring segments that touch on both sides."""
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
        return self._replace(
            source=self.source[starts],
            target=self.target[starts],
            lengths=np.add.reduceat(self.lengths, starts),
            rows=self.rows[starts],
            cols=self.cols[starts],
        )

    def expand(self) -> tuple[Int64s, Int64s, Int64s]:
        """Name every piece: source offsets, target offsets, lengths."""
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
    """A single piece at offset 0."""
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    flat = Stride(num_bytes, num_bytes)
    return Pieces(zero, zero, one * num_bytes, one, one, flat, flat, whole_pages=True)


class Grain(NamedTuple):
    """What a segment is made of: tokens of ``num_units`` units of ``unit_bytes``.

    ``full_tokens`` is the length of a segment that fills a page.
    """

    token_stride: Stride
    unit_stride: Stride
    num_units: int
    unit_bytes: int
    full_tokens: int


def pieces_of(source: Int64s, target: Int64s, num_tokens: Int64s, grain: Grain) -> Pieces:
    """The pieces of segments of ``num_tokens`` tokens, each fused as far as both sides allow.

    ``source`` and ``target`` are the offsets of each segment's first unit.
    """
    lengths, rows, cols = _fuse(num_tokens, grain)
    _, full_rows, full_cols = _fuse(np.array([grain.full_tokens], dtype=np.int64), grain)
    return Pieces(
        source,
        target,
        lengths,
        rows,
        cols,
        grain.token_stride,
        grain.unit_stride,
        whole_pages=bool(full_rows[0] == full_cols[0] == 1),
    )


def _fuse(num_tokens: Int64s, grain: Grain) -> tuple[Int64s, Int64s, Int64s]:
    """Units into rows, tokens into columns, both, or neither: lengths, rows and columns."""
    token_stride, unit_stride, num_units, unit_bytes, _ = grain
    one = np.ones_like(num_tokens)
    row_bytes = num_units * unit_bytes
    if num_units == 1 or unit_stride == (unit_bytes, unit_bytes):
        # A token's units lie together. Whole segments are one piece where rows follow
        # each other without a gap.
        if token_stride == (row_bytes, row_bytes):
            return num_tokens * row_bytes, one, one
        return one * row_bytes, num_tokens, one
    if token_stride == (unit_bytes, unit_bytes):
        # A unit's tokens lie together; units follow without a gap only in a full page.
        column = num_tokens * unit_bytes
        dense = (column == unit_stride.source) & (column == unit_stride.target)
        return np.where(dense, num_units, 1) * column, one, np.where(dense, 1, num_units)
    return one * unit_bytes, num_tokens, one * num_units
