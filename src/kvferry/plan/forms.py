"""Forms: the pieces of a move, but for the pages that they lie in.

How tokens fall into the pages of two sides, and each page into pieces, is the same for every
request of one size. So it is worked out once, and a request's pages are put in.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.layout.pages import LocalTokens
from kvferry.plan.coalesce import Grain, Pieces, Stride, pieces_of
from kvferry.plan.places import Int64s, PageTable

# Short requests of one size recur, and to work their form out would take longer than to copy
# them. Long ones recur rarely, and would be much to keep.
SHORT_TOKENS, MAX_FORMS = 2048, 128


class _Stretches(NamedTuple):
    """Stretches of tokens at one end: which page after the first each is in, and where inside.

    ``every``: each page of them has one.
    """

    place: Int64s
    within: Int64s
    every: bool


class PageCut(NamedTuple):
    """How one end cuts the tokens of one move into pages, whichever pages these are.

    The tokens have the local indices ``first, first + advance, ...`` there, counted from the
    page that the first of them is in. ``unit`` is the first of the move's units there.
    """

    page_tokens: int
    first: int
    advance: int
    unit: int

    def page_starts(self, num_tokens: int) -> Int64s:
        """Which of the move's tokens, by index, are the first in a new page."""
        if self.advance == 1:
            return np.arange(-self.first % self.page_tokens or self.page_tokens, num_tokens,
                             self.page_tokens, dtype=np.int64)  # fmt: skip
        pages = np.arange(1, self._num_pages(num_tokens))
        return -((self.first - pages * self.page_tokens) // self.advance)

    def locate(self, starts: Int64s) -> _Stretches:
        """Where the tokens at ``starts`` are."""
        place, within = np.divmod(self.first + starts * self.advance, self.page_tokens)
        return _Stretches(place, within, every=False)

    def locate_pages(self, num_tokens: int) -> _Stretches:
        """Where the tokens are that are the first in each page: ``locate`` without a division."""
        num_pages = self._num_pages(num_tokens)
        place = np.arange(num_pages, dtype=np.int64)
        within = np.zeros(num_pages, dtype=np.int64)
        within[0] = self.first
        return _Stretches(place, within, every=True)

    def _num_pages(self, num_tokens: int) -> int:
        # The first token is in page 0.
        return LocalTokens(self.page_tokens, self.first, self.advance).pages(num_tokens).end

    def cuts_like(self, other: PageCut) -> bool:
        """Whether both have their pages' edges at the same tokens, and every token of them."""
        return (
            self.advance == other.advance == 1
            and self.page_tokens == other.page_tokens
            and self.first == other.first
        )


class RequestPages(NamedTuple):
    """Where one end keeps the tokens of one move: the first are in ``page`` of the request."""

    page: int
    table: PageTable

    def pages(self, stretches: _Stretches, group: str) -> Int64s:
        """The page of each stretch."""
        last = int(stretches.place[-1])
        skip = self.page - self.table.first_page
        if skip < 0 or self.page + last >= self.table.end_page:
            raise InputError(
                f"group {group!r} needs pages {self.page}..{self.page + last} of the request, "
                f"but {self.table!r} was given; pass every page that the tokens touch"
            )
        if stretches.every:
            return self.table.pages[skip : skip + last + 1]
        return self.table.pages[skip + stretches.place]


class Spacing(NamedTuple):
    """All that a tensor's pieces follow from at one end, but for its bases and its pages."""

    page_stride: int
    token_stride: int
    unit_stride: int
    num_pages: int


class Grid(NamedTuple):
    """What one tensor of one move carries for each layer."""

    group: str
    num_units: int
    unit_bytes: int
    num_tokens: int


class FormKey(NamedTuple):
    """All that a tensor's form follows from."""

    grid: Grid
    source: PageCut
    target: PageCut
    ours: Spacing
    theirs: Spacing


class _Form(NamedTuple):
    """Pieces but for the pages that they are in; requests of one size have it in common.

    The offsets of ``pieces`` are those inside their pages.
    """

    source: _Stretches
    target: _Stretches
    pieces: Pieces


def _form(key: FormKey) -> _Form:
    grid, source, target, ours, theirs = key
    segments = _segments(grid.num_tokens, source, target)
    grain = Grain(
        Stride(ours.token_stride * source.advance, theirs.token_stride * target.advance),
        Stride(ours.unit_stride, theirs.unit_stride),
        grid.num_units,
        grid.unit_bytes,
        _full_segment(source, target),
    )
    pieces = pieces_of(
        segments.source.within * ours.token_stride + source.unit * ours.unit_stride,
        segments.target.within * theirs.token_stride + target.unit * theirs.unit_stride,
        segments.num_tokens,
        grain,
    )
    return _Form(segments.source, segments.target, pieces)


_known_form = lru_cache(maxsize=MAX_FORMS)(_form)


# The layers of a request are bound one parcel after another, and K and V usually lie alike:
# then they have the very same pieces. Page tables are compared by identity.
@lru_cache(maxsize=32)
def pieces_on(key: FormKey, source: RequestPages, target: RequestPages) -> Pieces:
    """The pieces of a form on these pages. Raises ``InputError`` where they are wrong."""
    grid, ours, theirs = key.grid, key.ours, key.theirs
    form = (_known_form if grid.num_tokens <= SHORT_TOKENS else _form)(key)
    from_ = source.pages(form.source, grid.group)
    into = target.pages(form.target, grid.group)
    _demand_there(grid.group, from_, ours.num_pages)
    _demand_there(grid.group, into, theirs.num_pages)
    _demand_distinct(grid.group, form.target.place, into)
    return Pieces(
        from_ * ours.page_stride + form.pieces.source,
        into * theirs.page_stride + form.pieces.target,
        *form.pieces[2:],
    )


def _demand_there(group: str, pages: Int64s, num_pages: int) -> None:
    lowest, highest = (pages[0], pages[0]) if len(pages) == 1 else (pages.min(), pages.max())
    if lowest < 0 or highest >= num_pages:
        raise InputError(
            f"group {group!r} names page {lowest} or {highest}, "
            f"but its pool has pages 0..{num_pages - 1}"
        )


def _demand_distinct(group: str, place: Int64s, pages: Int64s) -> None:
    """Two pages of a request in one place would overwrite each other."""
    if len(place) == 1 or place[0] == place[-1]:
        return
    new = np.empty(len(place), dtype=np.bool_)
    new[0], new[1:] = True, place[1:] != place[:-1]
    visited = pages[new]
    visited.sort()
    if (visited[1:] == visited[:-1]).any():
        raise InputError(f"a target page appears twice in the table of group {group!r}")


# ---------------------------------------------------------------- segments


class _Segments(NamedTuple):
    """Stretches of tokens that lie in one page on each side."""

    source: _Stretches
    target: _Stretches
    num_tokens: Int64s


def _segments(num_tokens: int, source: PageCut, target: PageCut) -> _Segments:
    alike = source.cuts_like(target)
    inner = source.page_starts(num_tokens)
    if not alike:
        inner = np.concatenate((inner, target.page_starts(num_tokens)))
        inner.sort()
    marks = np.empty(len(inner) + 2, dtype=np.int64)
    marks[0], marks[1:-1], marks[-1] = 0, inner, num_tokens
    if alike:
        ours, theirs = (end.locate_pages(num_tokens) for end in (source, target))
        return _Segments(ours, theirs, marks[1:] - marks[:-1])
    # By hand: numpy's own unique hashes, and its diff costs more than all of this.
    last = np.flatnonzero(marks[1:] != marks[:-1])
    starts, ends = marks[last], marks[last + 1]
    return _Segments(source.locate(starts), target.locate(starts), ends - starts)


def _full_segment(source: PageCut, target: PageCut) -> int:
    """The tokens of a stretch that is as long as the two sides' pages let it be."""
    ours, theirs = (-(-end.page_tokens // end.advance) for end in (source, target))
    behind = (source.first - target.first) % ours
    if ours == theirs and source.advance == target.advance == 1 and behind:
        # Equal pages that begin at different tokens cut each other in two, always alike.
        return max(behind, ours - behind)
    return min(ours, theirs)
