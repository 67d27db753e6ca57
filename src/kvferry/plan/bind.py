"""A plan applied to one request's pages: byte ranges, still without addresses.

The cost of a binding is that of its pages. Segments are worked out once per
token set and reused by every layer and tensor; nothing here enumerates tokens
or pieces. All arithmetic is 64-bit, and what would not fit is refused.

Staging needs no second mechanism: a slot is one more side (``Image``), dense,
with a single page as long as the parcel. Binding a source to it is a gather,
binding it to a target is a scatter, and both halves agree on the bytes between
because both derive them from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Holding, Layout, find_holding
from kvferry.layout.spec import Group, Slot
from kvferry.plan.coalesce import Grain, Pieces, Stride, one_piece, pieces_of
from kvferry.plan.places import MAX_OFFSET, Base, Int64s, PageTable, Placement, PoolMap
from kvferry.plan.plan import Block, Move, Plan, Request


class Pair(NamedTuple):
    """A source rank and a target rank."""

    source: int
    target: int


class Side:
    """One rank's half of a binding: its memory, and one request's pages in it."""

    def __init__(self, pools: PoolMap, tables: dict[str, PageTable]) -> None:
        self.pools = pools
        self.tables = tables


class Image:
    """A staging slot as a side: region 0, dense, in the plan's own order."""


class Part(NamedTuple):
    """One tensor of one move: the same pieces in each of its layers."""

    group: str
    tensor: str
    source_bases: tuple[Base, ...]
    target_bases: tuple[Base, ...]
    pieces: Pieces

    @property
    def num_layers(self) -> int:
        """Layers that share these pieces."""
        return len(self.source_bases)

    def of_layers(self, layers: Span) -> Part | None:
        """The part that lies in those layers; None where nothing does."""
        ours = tuple(base for base in self.source_bases if base.layer in layers)
        theirs = tuple(base for base in self.target_bases if base.layer in layers)
        return self._replace(source_bases=ours, target_bases=theirs) if ours else None


class Descriptors(NamedTuple):
    """Every piece named: parallel arrays, ready for a transport to add addresses."""

    source_region: Int64s
    source_offset: Int64s
    target_region: Int64s
    target_offset: Int64s
    length: Int64s


class Binding(NamedTuple):
    """What one source owes one target for one stretch of one request."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """The payload."""
        return sum(part.num_layers * part.pieces.num_bytes for part in self.parts)

    @property
    def num_pieces(self) -> int:
        """How many contiguous pieces there are."""
        return sum(part.num_layers * part.pieces.num_pieces for part in self.parts)

    @property
    def contiguous(self) -> bool:
        """Whether the runs path is open: a full page is one piece on both sides."""
        return all(part.pieces.contiguous for part in self.parts)

    @staticmethod
    @lru_cache(maxsize=4096)
    def bulk(source: Base, target: Base, num_bytes: int) -> Binding:
        """One piece, as a staged write is; remembered, because slots are used again and again."""
        return Binding((Part("", "", (source,), (target,), one_piece(num_bytes)),))

    def merged(self) -> Binding:
        """The same bytes with neighbouring pages merged."""
        return Binding(tuple(part._replace(pieces=part.pieces.merged()) for part in self.parts))

    def of_layers(self, layers: Span) -> Binding:
        """The part that lies in those layers, with nothing worked out anew."""
        return Binding(tuple(part for whole in self.parts if (part := whole.of_layers(layers))))

    def descriptors(self) -> Descriptors:
        """Name every piece of every layer. The only step whose cost is that of its pieces."""
        rows = [_describe(part) for part in self.parts] or [_NOTHING]
        return Descriptors(*(np.concatenate(column) for column in zip(*rows, strict=True)))


_NOTHING = Descriptors(*(np.zeros(0, dtype=np.int64) for _ in Descriptors._fields))


def bind(
    plan: Plan,
    pair: Pair,
    request: Request,
    source: Side | Image,
    target: Side | Image,
    blocks: Sequence[Block] | None = None,
    *,
    moves: Sequence[Move] | None = None,
) -> Binding:
    """Bind what ``pair.source`` owes ``pair.target``: all of it, or those blocks of it.

    ``moves`` binds only those of the pair's moves. In an image the parts follow
    each other in the order of the blocks.
    """
    if moves is None:
        moves = plan.between(*pair)
    if blocks is None:
        blocks = plan.blocks_of(moves, request)
    parts: list[Part] = []
    offset = 0
    for block in blocks:
        for whole in moves:
            move, tokens = _clipped(plan, whole, request, block)
            if not tokens.num_tokens:
                continue
            group = plan.spec.group(move.group)
            from_ = _Rank(plan.source, plan.held[move.source], move.source_unit)
            into = _Rank(plan.target, plan.wanted[move.target], move.target_unit)
            parts += _bind_move(
                group,
                move,
                tokens.num_tokens,
                _end(group, move, tokens, from_, source, offset),
                _end(group, move, tokens, into, target, offset),
            )
            offset += _demand_fits(_move_bytes(group, move, tokens))
    return Binding(tuple(parts))


def _clipped(plan: Plan, move: Move, request: Request, block: Block) -> tuple[Move, Tokens]:
    """The part of a move that lies in the block, and its tokens, which may be none."""
    layers = move.layers.intersect(block.layers)
    if move.group != block.group or not plan.spec.group(move.group).layers_in(layers):
        return move, Tokens(0, 0)
    return replace(move, layers=layers), plan.tokens_of(move, request).clip(block.tokens)


def _move_bytes(group: Group, move: Move, tokens: Tokens) -> int:
    cells = len(group.layers_in(move.layers)) * len(move.units)
    return tokens.num_tokens * cells * group.unit_bytes


def _demand_fits(num_bytes: int) -> int:
    if num_bytes >= MAX_OFFSET:
        raise InputError("a move carries 2**62 bytes or more; bind fewer tokens or layers at once")
    return num_bytes


def _describe(part: Part) -> Descriptors:
    source, target, lengths = part.pieces.expand()
    source_region, source_base = _columns(part.source_bases)
    target_region, target_base = _columns(part.target_bases)
    return Descriptors(
        np.repeat(source_region, len(lengths)),
        (source_base[:, None] + source).ravel(),
        np.repeat(target_region, len(lengths)),
        (target_base[:, None] + target).ravel(),
        np.tile(lengths, part.num_layers),
    )


def _columns(bases: Sequence[Base]) -> tuple[Int64s, Int64s]:
    table = np.array([(base.region, base.offset) for base in bases], dtype=np.int64)
    return table[:, 0], table[:, 1]


# ---------------------------------------------------------------- one end of a move


class _Rank(NamedTuple):
    """What the plan says about one end: its layout, its holdings, its first unit."""

    layout: Layout
    holdings: tuple[Holding, ...]
    unit: int


class _Located(NamedTuple):
    """Stretches of tokens at one end: the page's place in the table, its number, where inside."""

    place: Int64s
    page: Int64s
    within: Int64s


class _Paging(NamedTuple):
    """How one end keeps the tokens of one move: the local indices ``first, first + advance, ...``.

    ``unit`` is the first of the move's units there.
    """

    page_tokens: int
    first: int
    advance: int
    table: PageTable
    unit: int

    def page_starts(self, num_tokens: int) -> Int64s:
        """Which of the move's tokens, by index, are the first in a new page."""
        if self.advance == 1:
            return np.arange(-self.first % self.page_tokens or self.page_tokens, num_tokens,
                             self.page_tokens, dtype=np.int64)  # fmt: skip
        last = self.first + (num_tokens - 1) * self.advance
        pages = np.arange(self.first // self.page_tokens + 1, last // self.page_tokens + 1)
        return -((self.first - pages * self.page_tokens) // self.advance)

    def locate(self, starts: Int64s, group: str) -> _Located:
        """Where the tokens at ``starts`` are."""
        index, within = np.divmod(self.first + starts * self.advance, self.page_tokens)
        self._demand_pages(int(index[0]), int(index[-1]), group)
        return _Located(index, self.table.pages[index - self.table.first_page], within)

    def locate_pages(self, num_tokens: int, group: str) -> _Located:
        """Where the tokens are that are the first in each page: ``locate`` without a division."""
        first, last = (at // self.page_tokens for at in (self.first, self.first + num_tokens - 1))
        self._demand_pages(first, last, group)
        place = np.arange(first, last + 1, dtype=np.int64)
        within = np.zeros(len(place), dtype=np.int64)
        within[0] = self.first % self.page_tokens
        skip = self.table.first_page
        return _Located(place, self.table.pages[first - skip : last + 1 - skip], within)

    def cuts_like(self, other: _Paging) -> bool:
        """Whether both have their pages' edges at the same tokens, and every token of them."""
        return (
            self.advance == other.advance == 1
            and self.page_tokens == other.page_tokens
            and (self.first - other.first) % self.page_tokens == 0
        )

    def _demand_pages(self, first: int, last: int, group: str) -> None:
        if first < self.table.first_page or last >= self.table.end_page:
            raise InputError(
                f"group {group!r} needs pages {first}..{last} of the request, "
                f"but {self.table!r} was given; pass every page that the tokens touch"
            )


class _End(NamedTuple):
    """One end of a move: its tokens, and where each tensor is."""

    paging: _Paging
    placements: tuple[Placement, ...]


# Every image has one page, so all of them share a table, by which pieces are remembered.
_IMAGE_TABLE = PageTable([0])


def _full_segment(source: _Paging, target: _Paging) -> int:
    """The tokens of a stretch that is as long as the two sides' pages let it be."""
    ours, theirs = (-(-end.page_tokens // end.advance) for end in (source, target))
    behind = (source.first - target.first) % ours
    if ours == theirs and source.advance == target.advance == 1 and behind:
        # Equal pages that begin at different tokens cut each other in two, always alike.
        return max(behind, ours - behind)
    return min(ours, theirs)


def _end(
    group: Group, move: Move, tokens: Tokens, rank: _Rank, side: Side | Image, offset: int
) -> _End:
    count = tokens.num_tokens
    if isinstance(side, Image):
        placements = _image_placements(group, move, count, offset)
        return _End(_Paging(count, 0, 1, _IMAGE_TABLE, 0), placements)
    if group.name not in side.tables:
        raise InputError(f"the request has no page table for group {group.name!r}; pass one")
    table = side.tables[group.name]
    placements = tuple(side.pools.of(group.name, tensor.name) for tensor in group.tensors)
    if isinstance(group.kind, Slot):
        return _End(_Paging(1, 0, 1, table, rank.unit), placements)
    held = find_holding(rank.holdings, group.name, group.layers_in(move.layers)[0]).tokens
    first, advance = held.local_index(tokens.first), tokens.step // held.step
    return _End(_Paging(rank.layout.page_tokens, first, advance, table, rank.unit), placements)


# Parcels of one size recur, and making a base for each layer is most of what a binding costs.
@lru_cache(maxsize=1024)
def _image_placements(
    group: Group, move: Move, num_tokens: int, offset: int
) -> tuple[Placement, ...]:
    """Dense and in order: layer, tensor, token, unit."""
    layers = group.layers_in(move.layers)
    cells = num_tokens * len(move.units)
    placements = []
    for tensor in group.tensors:
        row, page = len(move.units) * tensor.unit_bytes, cells * tensor.unit_bytes
        bases = tuple(
            Base(layer, 0, offset + i * cells * group.unit_bytes) for i, layer in enumerate(layers)
        )
        placements.append(
            Placement(group.name, tensor.name, page, row, tensor.unit_bytes, 1, bases)
        )
        offset += cells * tensor.unit_bytes
    return tuple(placements)


# ---------------------------------------------------------------- one move


class _Segments(NamedTuple):
    """Stretches of tokens that lie in one page on each side."""

    source: _Located
    target: _Located
    num_tokens: Int64s


def _bind_move(group: Group, move: Move, num_tokens: int, source: _End, target: _End) -> list[Part]:
    layers = group.layers_in(move.layers)
    parts: list[Part] = []
    for tensor, ours, theirs in zip(
        group.tensors, source.placements, target.placements, strict=True
    ):
        spacing = _spacing(ours), _spacing(theirs)
        grid = _Grid(group.name, len(move.units), tensor.unit_bytes, num_tokens)
        pieces = _pieces(grid, source.paging, target.paging, *spacing)
        bases = ours.bases_of(layers), theirs.bases_of(layers)
        parts.append(Part(group.name, tensor.name, *bases, pieces))
    return parts


class _Spacing(NamedTuple):
    """All that a tensor's pieces follow from at one end, but for its bases and its pages."""

    page_stride: int
    token_stride: int
    unit_stride: int
    num_pages: int


def _spacing(at: Placement) -> _Spacing:
    return _Spacing(at.page_stride, at.token_stride, at.unit_stride, at.num_pages)


class _Grid(NamedTuple):
    """What one tensor of one move carries for each layer."""

    group: str
    num_units: int
    unit_bytes: int
    num_tokens: int


def _segments(group: str, num_tokens: int, source: _Paging, target: _Paging) -> _Segments:
    alike = source.cuts_like(target)
    inner = source.page_starts(num_tokens)
    if not alike:
        inner = np.concatenate((inner, target.page_starts(num_tokens)))
        inner.sort()
    marks = np.empty(len(inner) + 2, dtype=np.int64)
    marks[0], marks[1:-1], marks[-1] = 0, inner, num_tokens
    if alike:
        starts, ends = marks[:-1], marks[1:]
        ours, theirs = (end.locate_pages(num_tokens, group) for end in (source, target))
        return _Segments(ours, theirs, ends - starts)
    # By hand: numpy's own unique hashes, and its diff costs more than all of this.
    last = np.flatnonzero(marks[1:] != marks[:-1])
    starts, ends = marks[last], marks[last + 1]
    return _Segments(source.locate(starts, group), target.locate(starts, group), ends - starts)


def _demand_distinct(group: str, target: _Located) -> None:
    """Two pages of a request in one place would overwrite each other."""
    place = target.place
    if place[0] == place[-1]:
        return
    new = np.empty(len(place), dtype=np.bool_)
    new[0], new[1:] = True, place[1:] != place[:-1]
    visited = target.page[new]
    visited.sort()
    if (visited[1:] == visited[:-1]).any():
        raise InputError(f"a target page appears twice in the table of group {group!r}")


# The layers of a request are bound one parcel after another, and K and V usually lie alike:
# then they have the very same pieces. Page tables are compared by identity.
@lru_cache(maxsize=32)
def _pieces(
    grid: _Grid, source: _Paging, target: _Paging, ours: _Spacing, theirs: _Spacing
) -> Pieces:
    segments = _segments(grid.group, grid.num_tokens, source, target)
    _demand_distinct(grid.group, segments.target)
    grain = Grain(
        Stride(ours.token_stride * source.advance, theirs.token_stride * target.advance),
        Stride(ours.unit_stride, theirs.unit_stride),
        grid.num_units,
        grid.unit_bytes,
        _full_segment(source, target),
    )
    return pieces_of(
        _offsets(grid.group, ours, source.unit, segments.source),
        _offsets(grid.group, theirs, target.unit, segments.target),
        segments.num_tokens,
        grain,
    )


def _offsets(group: str, spacing: _Spacing, unit: int, at: _Located) -> Int64s:
    pages = at.page
    if pages.min() < 0 or pages.max() >= spacing.num_pages:
        raise InputError(
            f"group {group!r} names page {pages.min()} or {pages.max()}, "
            f"but its pool has pages 0..{spacing.num_pages - 1}"
        )
    return (
        pages * spacing.page_stride + at.within * spacing.token_stride + unit * spacing.unit_stride
    )
