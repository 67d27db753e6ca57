"""Bindings: a plan applied to one request's pages. Byte ranges, still without addresses.

Binding costs the number of pages, not of tokens or pieces. Segments are worked out once for each
token set and reused by every layer and tensor. All arithmetic is in 64 bits, and ``bind`` refuses
what would overflow.

A staging slot is one more kind of side (``StagingView``): dense, with a single page. Binding a
source to it gives the gather, and binding it to a target gives the scatter. Both halves derive the
order of the bytes in the slot from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard, find_shard
from kvferry.layout.pages import local_tokens
from kvferry.layout.spec import Group
from kvferry.layout.tokens import Tokens
from kvferry.plan.coalesce import Pieces, one_piece
from kvferry.plan.places import MAX_OFFSET, Base, Int64s, PageTable, Placement, PoolMap
from kvferry.plan.plan import Block, Move, Plan, Request
from kvferry.plan.segments import (
    PageCut,
    PieceKey,
    PoolStrides,
    RequestPages,
    TensorBlock,
    bind_pieces,
)


class RankPair(NamedTuple):
    """A source rank and a target rank."""

    source: int
    target: int


# A request's page tables on one rank, by group. None for a staging slot.
Tables = Mapping[str, PageTable] | None


class PagedView:
    """One rank's pools, and one request's pages in them."""

    def __init__(self, pools: PoolMap, tables: dict[str, PageTable]) -> None:
        self.pools = pools
        self.tables = tables


class StagingView:
    """A staging slot in place of paged memory: region 0, dense, in the order of the plan."""

    pools: ClassVar[None] = None
    tables: ClassVar[None] = None


class BindingPart(NamedTuple):
    """One tensor of one move. Each of its layers has the same pieces."""

    group: str
    tensor: str
    source_bases: tuple[Base, ...]
    target_bases: tuple[Base, ...]
    pieces: Pieces

    @property
    def num_layers(self) -> int:
        """Number of layers that have these pieces."""
        return len(self.source_bases)

    def of_layers(self, layers: Span) -> BindingPart | None:
        """Return this part restricted to some layers, or None if it has none of them."""
        source_bases = tuple(base for base in self.source_bases if base.layer in layers)
        target_bases = tuple(base for base in self.target_bases if base.layer in layers)
        if not source_bases:
            return None
        return self._replace(source_bases=source_bases, target_bases=target_bases)


class BindingSize(NamedTuple):
    """How much a binding copies, and in how many contiguous pieces."""

    num_bytes: int
    num_pieces: int


class Descriptors(NamedTuple):
    """Every piece as a row of parallel arrays. A transport adds the addresses."""

    source_region: Int64s
    source_offset: Int64s
    target_region: Int64s
    target_offset: Int64s
    length: Int64s


class Binding(NamedTuple):
    """The blocks that one source sends one target: all of a request, or some of it."""

    parts: tuple[BindingPart, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes to copy."""
        return self.size.num_bytes

    @property
    def num_pieces(self) -> int:
        """Number of contiguous pieces."""
        return self.size.num_pieces

    @property
    def size(self) -> BindingSize:
        """Numbers of bytes and pieces, for about the cost of either."""
        num_bytes = num_pieces = 0
        last: Pieces | None = None
        each = BindingSize(0, 0)
        for part in self.parts:
            # K and V often share one object.
            if part.pieces is not last:
                last = part.pieces
                each = BindingSize(last.num_bytes, last.num_pieces)
            num_bytes += part.num_layers * each.num_bytes
            num_pieces += part.num_layers * each.num_pieces
        return BindingSize(num_bytes, num_pieces)

    @property
    def contiguous(self) -> bool:
        """Whether a full page is one piece on both sides, as the mode ``runs`` requires."""
        return all(part.pieces.contiguous for part in self.parts)

    @staticmethod
    @lru_cache(maxsize=4096)
    def bulk(source: Base, target: Base, num_bytes: int) -> Binding:
        """Return a binding of a single piece, as for the bulk write of a staging slot.

        Cached, because the same slots are written again and again.
        """
        return Binding((BindingPart("", "", (source,), (target,), one_piece(num_bytes)),))

    def merged(self) -> Binding:
        """Return the same bytes with adjacent pages merged."""
        return Binding(tuple(part._replace(pieces=part.pieces.merged()) for part in self.parts))

    def of_layers(self, layers: Span) -> Binding:
        """Return this binding restricted to some layers, without binding again."""
        return Binding(tuple(part for whole in self.parts if (part := whole.of_layers(layers))))

    def parts_by_pieces(self) -> Sequence[Sequence[BindingPart]]:
        """Return neighbouring parts grouped by ``Pieces`` object, which K and V often share."""
        if len(self.parts) == 2 and self.parts[0].pieces is self.parts[1].pieces:
            return (self.parts,)
        return [tuple(same) for _, same in groupby(self.parts, key=lambda part: id(part.pieces))]

    def descriptors(self) -> Descriptors:
        """Return every piece of every layer. Only this step costs the number of pieces."""
        rows = [_describe(part) for part in self.parts] or [_NO_DESCRIPTORS]
        return Descriptors(*(np.concatenate(column) for column in zip(*rows, strict=True)))


_NO_DESCRIPTORS = Descriptors(*(np.zeros(0, dtype=np.int64) for _ in Descriptors._fields))


def bind(
    plan: Plan,
    pair: RankPair,
    request: Request,
    source: PagedView | StagingView,
    target: PagedView | StagingView,
    blocks: Sequence[Block] | None = None,
    *,
    moves: Sequence[Move] | None = None,
) -> Binding:
    """Bind what ``pair.source`` sends ``pair.target``: the whole request, or some blocks.

    ``moves`` restricts the binding to some of the pair's moves. In a staging slot the parts follow
    each other in the order of the blocks. Raises ``InputError`` if a page table is wrong.
    """
    template = make_template(plan, pair, request, source.pools, target.pools, blocks, moves=moves)
    return template.bind(source.tables, target.tables)


# ---------------------------------------------------------------- templates


class _TensorTemplate(NamedTuple):
    """One tensor of one move without its pages."""

    tensor: str
    source_bases: tuple[Base, ...]
    target_bases: tuple[Base, ...]
    key: PieceKey


class _MoveTemplate(NamedTuple):
    """One move without its pages. It begins at these pages of the request."""

    group: str
    source_page: int
    target_page: int
    tensors: tuple[_TensorTemplate, ...]

    def shifted(self, source_pages: int, target_pages: int) -> _MoveTemplate:
        return _MoveTemplate(
            self.group, self.source_page + source_pages, self.target_page + target_pages,
            self.tensors,
        )  # fmt: skip

    def bind(self, source: Tables, target: Tables) -> Iterator[BindingPart]:
        source_pages = RequestPages(self.source_page, _table(source, self.group))
        target_pages = RequestPages(self.target_page, _table(target, self.group))
        for tensor, source_bases, target_bases, key in self.tensors:
            pieces = bind_pieces(key, source_pages, target_pages)
            yield BindingPart(self.group, tensor, source_bases, target_bases, pieces)


class BindingTemplate(NamedTuple):
    """A binding without its pages: what requests of one size between two ranks share."""

    moves: tuple[_MoveTemplate, ...]

    def bind(self, source: Tables, target: Tables) -> Binding:
        """Return the binding of one request. Raises ``InputError`` if a page table is wrong."""
        return Binding(tuple(part for move in self.moves for part in move.bind(source, target)))

    def shifted(self, source_pages: int, target_pages: int) -> BindingTemplate:
        """Return the template for tokens that begin this many pages later in the request."""
        if not source_pages and not target_pages:
            return self
        return BindingTemplate(
            tuple(move.shifted(source_pages, target_pages) for move in self.moves)
        )


def make_template(
    plan: Plan,
    pair: RankPair,
    request: Request,
    source: PoolMap | None,
    target: PoolMap | None,
    blocks: Sequence[Block] | None = None,
    *,
    moves: Sequence[Move] | None = None,
) -> BindingTemplate:
    """Return the part of ``bind`` that does not depend on pages. A staging slot has no pools."""
    if moves is None:
        moves = plan.between(*pair)
    if blocks is None:
        blocks = plan.blocks_of(moves, request)
    templates: list[_MoveTemplate] = []
    offset = 0
    for block in blocks:
        for whole in moves:
            move, tokens = _clip(plan, whole, request, block)
            if not tokens.num_tokens:
                continue
            group = plan.forms.groups[move.group]
            layers = group.layers_in(move.layers)
            columns = plan.forms.transposed_in(group)
            held, wanted = plan.held[move.source], plan.wanted[move.target]
            source_rank = _RankShards(plan.source, held, move.source_unit, columns)
            target_rank = _RankShards(plan.target, wanted, move.target_unit, columns)
            templates.append(
                _move_template(
                    group,
                    move,
                    layers,
                    tokens,
                    _move_end(group, move, layers, tokens, source_rank, source, offset),
                    _move_end(group, move, layers, tokens, target_rank, target, offset),
                )
            )
            num_bytes = tokens.num_tokens * len(layers) * len(move.units) * group.unit_bytes
            if num_bytes >= MAX_OFFSET:
                raise InputError(
                    "a move carries 2**62 bytes or more; bind fewer tokens or layers at once"
                )
            offset += num_bytes
    return BindingTemplate(tuple(templates))


def _clip(plan: Plan, move: Move, request: Request, block: Block) -> tuple[Move, Tokens]:
    """Return a move restricted to a block, and its tokens there, which may be none."""
    layers = move.layers.intersect(block.layers)
    if move.group != block.group or not plan.spec.group(move.group).layers_in(layers):
        return move, Tokens(0, 0)
    return replace(move, layers=layers), plan.tokens_of(move, request).clip(block.tokens)


class _RankShards(NamedTuple):
    """One end of a move in the plan: the rank's layout and shards, and the move's first unit.

    ``columns`` are the tensors that a slot keeps transposed.
    """

    layout: Layout
    shards: tuple[Shard, ...]
    unit: int
    columns: tuple[str, ...]


class _MovePlacements(NamedTuple):
    """One end of a move in memory: how its tokens are paged, its first page, its tensors."""

    cut: PageCut
    page: int
    placements: tuple[Placement, ...]


# Every staging slot has one page. All share this table, so that cached pieces are found by it.
_SLOT_TABLE = PageTable([0])


def _move_end(
    group: Group,
    move: Move,
    layers: tuple[int, ...],
    tokens: Tokens,
    rank: _RankShards,
    pools: PoolMap | None,
    offset: int,
) -> _MovePlacements:
    num_tokens = tokens.num_tokens
    if pools is None:
        placements = _slot_placements(group, move, num_tokens, offset, rank.columns)
        packed = tokens.pattern.shifted(tokens.first)
        return _MovePlacements(PageCut(num_tokens, 0, packed, 0), 0, placements)
    placements = tuple(pools.of(group.name, tensor.name) for tensor in group.tensors)
    shard = find_shard(rank.shards, group.name, layers[0])
    local = local_tokens(rank.layout, group, shard, tokens)
    page, within = local.start
    held = local.held.shifted(tokens.first)
    return _MovePlacements(PageCut(local.page_tokens, within, held, rank.unit), page, placements)


# Cached, because pushes of one size recur, and bases for each layer are most of a binding's cost.
@lru_cache(maxsize=1024)
def _slot_placements(
    group: Group, move: Move, num_tokens: int, offset: int, columns: tuple[str, ...]
) -> tuple[Placement, ...]:
    """Return a move's tensors in a staging slot: dense, by layer, tensor, token and unit.

    Those in ``columns`` are transposed: by layer, tensor, unit, element and token.
    """
    layers = group.layers_in(move.layers)
    cells = num_tokens * len(move.units)
    placements = []
    for tensor in group.tensors:
        row, page = len(move.units) * tensor.unit_bytes, cells * tensor.unit_bytes
        bases = tuple(
            Base(layer, 0, offset + i * cells * group.unit_bytes) for i, layer in enumerate(layers)
        )
        strides: tuple[int, int] = row, tensor.unit_bytes
        column = None
        if tensor.name in columns:
            width = tensor.dtype.num_bytes
            strides, column = (width, num_tokens * tensor.unit_bytes), num_tokens * width
        placements.append(Placement(group.name, tensor.name, page, *strides, 1, bases, column))
        offset += cells * tensor.unit_bytes
    return tuple(placements)


def _move_template(
    group: Group,
    move: Move,
    layers: tuple[int, ...],
    tokens: Tokens,
    source: _MovePlacements,
    target: _MovePlacements,
) -> _MoveTemplate:
    counted = tokens.counted()
    tensors = []
    for tensor, from_, into in zip(
        group.tensors, source.placements, target.placements, strict=True
    ):
        width = tensor.dtype.num_bytes
        block = TensorBlock(group.name, len(move.units), tensor.unit_bytes, width, counted)
        key = PieceKey(block, source.cut, target.cut, _strides(from_), _strides(into))
        bases = from_.bases_of(layers), into.bases_of(layers)
        tensors.append(_TensorTemplate(tensor.name, *bases, key))
    return _MoveTemplate(group.name, source.page, target.page, tuple(tensors))


def _strides(at: Placement) -> PoolStrides:
    strides = at.page_stride, at.token_stride, at.unit_stride
    return PoolStrides(*strides, at.num_pages, at.element_stride)


def _table(tables: Tables, group: str) -> PageTable:
    if tables is None:
        return _SLOT_TABLE
    if group not in tables:
        raise InputError(f"the request has no page table for group {group!r}; pass one")
    return tables[group]


# ---------------------------------------------------------------- descriptors


def _describe(part: BindingPart) -> Descriptors:
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
