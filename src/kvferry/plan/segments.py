"""How page boundaries cut a move into segments, and segments into pieces.

A segment is a stretch of tokens in one page on each side. Segments depend on the size of a request
but not on its pages, so they are worked out once and cached; ``bind_pieces`` adds the pages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.layout.tokens import Pattern, Tokens
from kvferry.plan.coalesce import Elements, Pieces, SegmentShape, Stride, pieces_of
from kvferry.plan.places import Int64s, PageTable
from kvferry.plan.stretches import stretches

# Templates of short requests are cached: these sizes recur, and working a template out takes longer
# than copying the bytes. Long requests seldom have the same size, and their templates are large.
MAX_CACHED_TOKENS, MAX_CACHED_TEMPLATES = 2048, 128


class _SegmentStarts(NamedTuple):
    """Where segments begin at one end: pages after the first, and tokens inside the page.

    ``one_per_page`` says that every page has exactly one segment.
    """

    page: Int64s
    token: Int64s
    one_per_page: bool

    def repeated(self, times: int) -> _SegmentStarts:
        """Return each start several times."""
        page, token = np.repeat(self.page, times), np.repeat(self.token, times)
        return _SegmentStarts(page, token, one_per_page=False)


class PageCut(NamedTuple):
    """How one end of a move cuts its tokens into pages.

    ``first`` is the place of the move's first token in its page, from which pages are counted
    there. ``held`` is what the end holds, counted from the same token. ``unit`` is the first of the
    move's units there.
    """

    page_tokens: int
    first: int
    held: Pattern
    unit: int


class _MoveEnd(NamedTuple):
    """One end of a move: its pages, and where its stretches are in them.

    The first token of stretch ``i`` is token ``starts[i]`` of the move and has the local index
    ``local[i]``, counted from the start of the first page. The next tokens are ``advance`` apart.
    """

    page_tokens: int
    starts: Int64s
    local: Int64s
    advance: int
    num_tokens: int

    def page_starts(self) -> Int64s:
        """Return the indices of the move's tokens that are the first in a new page."""
        size, advance, local = self.page_tokens, self.advance, self.local
        if len(self.starts) == 1:
            first = int(local[0])
            if advance == 1:
                return np.arange(-first % size or size, self.num_tokens, size, dtype=np.int64)
            return -((first - np.arange(1, self.num_pages) * size) // advance)
        last = local + (np.diff(self.starts, append=self.num_tokens) - 1) * advance
        page = local // size
        num_starts = last // size - page
        stretch = np.repeat(np.arange(len(local)), num_starts)
        nth = np.arange(len(stretch)) - np.repeat(np.cumsum(num_starts) - num_starts, num_starts)
        inside = (page[stretch] + nth + 1) * size - local[stretch]
        return np.asarray(self.starts[stretch] - (-inside // advance))

    def locate(self, starts: Int64s) -> _SegmentStarts:
        """Return where the tokens with the indices ``starts`` are."""
        if len(self.starts) == 1:
            local = self.local[0] + starts * self.advance
        else:
            stretch = np.searchsorted(self.starts, starts, "right") - 1
            local = self.local[stretch] + (starts - self.starts[stretch]) * self.advance
        page, token = np.divmod(local, self.page_tokens)
        return _SegmentStarts(page, token, one_per_page=False)

    def locate_pages(self) -> _SegmentStarts:
        """Return where each page's first token is: ``locate`` without a division."""
        page = np.arange(self.num_pages, dtype=np.int64)
        token = np.zeros(self.num_pages, dtype=np.int64)
        token[0] = self.local[0]
        return _SegmentStarts(page, token, one_per_page=True)

    @property
    def num_pages(self) -> int:
        """Number of pages of a move of a single stretch."""
        return int(self.local[0] + (self.num_tokens - 1) * self.advance) // self.page_tokens + 1

    def cuts_like(self, other: _MoveEnd) -> bool:
        """Return whether both ends hold every token and begin pages at the same tokens."""
        return (
            self.advance == other.advance == 1
            and self.page_tokens == other.page_tokens
            and len(self.starts) == 1
            and self.local[0] == other.local[0]
        )


class RequestPages(NamedTuple):
    """One end's page table of a request, and the page of it in which a move begins."""

    page: int
    table: PageTable

    def pages(self, starts: _SegmentStarts, group: str) -> Int64s:
        """Return the page in the pool of each segment."""
        last = int(starts.page[-1])
        skip = self.page - self.table.first_page
        if skip < 0 or self.page + last >= self.table.end_page:
            raise InputError(
                f"group {group!r} needs pages {self.page}..{self.page + last} of the request, "
                f"but {self.table!r} was given; pass every page that the tokens touch"
            )
        if starts.one_per_page:
            return self.table.pages[skip : skip + last + 1]
        return self.table.pages[skip + starts.page]


class PoolStrides(NamedTuple):
    """A tensor's strides in bytes and its number of pages at one end.

    ``element_stride`` is None if units are contiguous.
    """

    page_stride: int
    token_stride: int
    unit_stride: int
    num_pages: int
    element_stride: int | None


class TensorBlock(NamedTuple):
    """The part of one tensor that one move carries in each layer, with units of ``unit_bytes``.

    Tokens are counted from the first of them, so that equal blocks of a request are equal.
    """

    group: str
    num_units: int
    unit_bytes: int
    element_bytes: int
    tokens: Tokens


class PieceKey(NamedTuple):
    """Everything that a tensor's pieces depend on, except pages and bases."""

    block: TensorBlock
    source: PageCut
    target: PageCut
    source_strides: PoolStrides
    target_strides: PoolStrides


class _PieceTemplate(NamedTuple):
    """Pieces without their pages. The offsets of ``pieces`` count from the start of a page."""

    source: _SegmentStarts
    target: _SegmentStarts
    pieces: Pieces


def _make_template(key: PieceKey) -> _PieceTemplate:
    block, source, target, from_, into = key
    found = stretches(block.tokens, source.held, target.held)
    ends = [
        _MoveEnd(cut.page_tokens, found.starts, local + cut.first, advance, block.tokens.num_tokens)
        for cut, local, advance in zip(
            (source, target), (found.source, found.target), found.advance, strict=True
        )
    ]
    starts, target_starts, num_tokens = _segments(*ends)
    advance = found.advance
    shape = SegmentShape(
        Stride(from_.token_stride * advance.source, into.token_stride * advance.target),
        Stride(from_.unit_stride, into.unit_stride),
        block.num_units,
        block.unit_bytes,
        min(found.longest, _full_segment(*ends)),
        _elements(block, from_, into),
    )
    at_source = starts.token * from_.token_stride + source.unit * from_.unit_stride
    at_target = target_starts.token * into.token_stride + target.unit * into.unit_stride
    if shape.is_translated and block.num_units > 1:
        # One segment for each unit, because tokens and elements make up its grid.
        units = np.tile(np.arange(block.num_units, dtype=np.int64), len(num_tokens))
        starts = starts.repeated(block.num_units)
        target_starts = target_starts.repeated(block.num_units)
        num_tokens = np.repeat(num_tokens, block.num_units)
        at_source = np.repeat(at_source, block.num_units) + units * from_.unit_stride
        at_target = np.repeat(at_target, block.num_units) + units * into.unit_stride
        shape = shape._replace(num_units=1)
    return _PieceTemplate(starts, target_starts, pieces_of(at_source, at_target, num_tokens, shape))


def _elements(block: TensorBlock, source: PoolStrides, target: PoolStrides) -> Elements | None:
    """Return the elements of a unit; None if they are contiguous on both sides."""
    if source.element_stride is None and target.element_stride is None:
        return None
    width = block.element_bytes
    stride = Stride(source.element_stride or width, target.element_stride or width)
    return Elements(stride, block.unit_bytes // width, width)


_cached_template = lru_cache(maxsize=MAX_CACHED_TEMPLATES)(_make_template)


# Cached, because a request's layers are bound one push after another, and K and V usually have the
# same strides: then they share one ``Pieces`` object. Page tables are compared by identity.
@lru_cache(maxsize=32)
def bind_pieces(key: PieceKey, source: RequestPages, target: RequestPages) -> Pieces:
    """Return the pieces on these pages. Raises ``InputError`` if a page is wrong."""
    block = key.block
    cached = block.tokens.num_tokens <= MAX_CACHED_TOKENS
    template = (_cached_template if cached else _make_template)(key)
    source_pages = source.pages(template.source, block.group)
    target_pages = target.pages(template.target, block.group)
    _check_in_pool(block.group, source_pages, key.source_strides.num_pages)
    _check_in_pool(block.group, target_pages, key.target_strides.num_pages)
    _check_distinct(block.group, template.target.page, target_pages)
    return Pieces(
        source_pages * key.source_strides.page_stride + template.pieces.source,
        target_pages * key.target_strides.page_stride + template.pieces.target,
        *template.pieces[2:],
    )


def _check_in_pool(group: str, pages: Int64s, num_pages: int) -> None:
    lowest, highest = (pages[0], pages[0]) if len(pages) == 1 else (pages.min(), pages.max())
    if lowest < 0 or highest >= num_pages:
        raise InputError(
            f"group {group!r} names page {lowest} or {highest}, "
            f"but its pool has pages 0..{num_pages - 1}"
        )


def _check_distinct(group: str, segment_page: Int64s, pages: Int64s) -> None:
    """Refuse two pages of a request in one place, because they would overwrite each other."""
    if len(segment_page) == 1 or segment_page[0] == segment_page[-1]:
        return
    first_in_page = np.empty(len(segment_page), dtype=np.bool_)
    first_in_page[0], first_in_page[1:] = True, segment_page[1:] != segment_page[:-1]
    visited = pages[first_in_page]
    visited.sort()
    if (visited[1:] == visited[:-1]).any():
        raise InputError(f"a target page appears twice in the table of group {group!r}")


def _segments(source: _MoveEnd, target: _MoveEnd) -> tuple[_SegmentStarts, _SegmentStarts, Int64s]:
    """Return where segments begin on the source and on the target, and their lengths in tokens."""
    alike = source.cuts_like(target)
    inner = source.page_starts()
    if not alike:
        inner = np.concatenate((source.starts[1:], inner, target.page_starts()))
        inner.sort()
    edges = np.empty(len(inner) + 2, dtype=np.int64)
    edges[0], edges[1:-1], edges[-1] = 0, inner, source.num_tokens
    if alike:
        return source.locate_pages(), target.locate_pages(), edges[1:] - edges[:-1]
    # np.unique hashes, and np.diff costs more than all of this.
    last = np.flatnonzero(edges[1:] != edges[:-1])
    starts, ends = edges[last], edges[last + 1]
    return source.locate(starts), target.locate(starts), ends - starts


def _full_segment(source: _MoveEnd, target: _MoveEnd) -> int:
    """Return the tokens of the longest segment that both sides' pages allow."""
    in_source, in_target = (-(-end.page_tokens // end.advance) for end in (source, target))
    behind = int(source.local[0] - target.local[0]) % in_source
    if (
        in_source == in_target
        and source.advance == target.advance == 1
        and len(source.starts) == 1
        and behind
    ):
        # Equal pages that begin at different tokens cut each other in two, always alike.
        return max(behind, in_source - behind)
    return min(in_source, in_target)
