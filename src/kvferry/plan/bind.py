"""A plan applied to one request's pages: byte ranges, still without addresses.

The cost of a binding is that of its pages. Segments are worked out once per
token set and reused by every layer and tensor; nothing here enumerates tokens
or pieces. All arithmetic is 64-bit, and what would not fit is refused.

Staging needs no second mechanism: a slot is one more side (``StagingView``), dense,
with a single page as long as the parcel. Binding a source to it is a gather,
binding it to a target is a scatter, and both halves agree on the bytes between
because both derive them from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Shard, find_shard
from kvferry.layout.pages import local_tokens
from kvferry.layout.spec import Group
from kvferry.plan.coalesce import Pieces, one_piece
from kvferry.plan.forms import FormKey, Grid, PageCut, RequestPages, Spacing, pieces_on
from kvferry.plan.places import MAX_OFFSET, Base, Int64s, PageTable, Placement, PoolMap
from kvferry.plan.plan import Block, Move, Plan, Request


class RankPair(NamedTuple):
    """A source rank and a target rank."""

    source: int
    target: int


# A request's pages in one rank's memory, by group. An image has none: it is a single page.
Tables = Mapping[str, PageTable] | None


class Side:
    """One rank's half of a binding: its memory, and one request's pages in it."""

    def __init__(self, pools: PoolMap, tables: dict[str, PageTable]) -> None:
        self.pools = pools
        self.tables = tables


class StagingView:
    """A staging slot as a side: region 0, dense, in the plan's own order."""

    pools: ClassVar[None] = None
    tables: ClassVar[None] = None


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


class Size(NamedTuple):
    """How much is copied, and in how many contiguous pieces."""

    num_bytes: int
    num_pieces: int


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
        return self.size.num_bytes

    @property
    def num_pieces(self) -> int:
        """How many contiguous pieces there are."""
        return self.size.num_pieces

    @property
    def size(self) -> Size:
        """Both of these."""
        num_bytes = num_pieces = 0
        last: Pieces | None = None
        each = Size(0, 0)
        for part in self.parts:
            # K and V often have the very same pieces.
            if part.pieces is not last:
                last = part.pieces
                each = Size(last.num_bytes, last.num_pieces)
            num_bytes += part.num_layers * each.num_bytes
            num_pieces += part.num_layers * each.num_pieces
        return Size(num_bytes, num_pieces)

    @property
    def contiguous(self) -> bool:
        """Whether the runs mode is open: a full page is one piece on both sides."""
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


class Outline(NamedTuple):
    """A binding but for the pages: what requests of one size between two ranks have in common."""

    drafts: tuple[_MoveTemplate, ...]

    def on(self, source: Tables, target: Tables) -> Binding:
        """The binding of one request's pages. Raises ``InputError`` where they are wrong."""
        return Binding(tuple(part for draft in self.drafts for part in draft.on(source, target)))

    def moved(self, source: int, target: int) -> Outline:
        """The same, so many pages later in the request."""
        if not source and not target:
            return self
        return Outline(tuple(draft.moved(source, target) for draft in self.drafts))


def bind(
    plan: Plan,
    pair: RankPair,
    request: Request,
    source: Side | StagingView,
    target: Side | StagingView,
    blocks: Sequence[Block] | None = None,
    *,
    moves: Sequence[Move] | None = None,
) -> Binding:
    """Bind what ``pair.source`` owes ``pair.target``: all of it, or those blocks of it.

    ``moves`` binds only those of the pair's moves. In an image the parts follow
    each other in the order of the blocks.
    """
    sketch = outline(plan, pair, request, source.pools, target.pools, blocks, moves=moves)
    return sketch.on(source.tables, target.tables)


def outline(
    plan: Plan,
    pair: RankPair,
    request: Request,
    source: PoolMap | None,
    target: PoolMap | None,
    blocks: Sequence[Block] | None = None,
    *,
    moves: Sequence[Move] | None = None,
) -> Outline:
    """What ``bind`` does before it looks at pages. An image has no pools."""
    if moves is None:
        moves = plan.between(*pair)
    if blocks is None:
        blocks = plan.blocks_of(moves, request)
    drafts: list[_MoveTemplate] = []
    offset = 0
    for block in blocks:
        for whole in moves:
            move, tokens = _clipped(plan, whole, request, block)
            if not tokens.num_tokens:
                continue
            group = plan.spec.group(move.group)
            layers = group.layers_in(move.layers)
            from_ = _Rank(plan.source, plan.held[move.source], move.source_unit)
            into = _Rank(plan.target, plan.wanted[move.target], move.target_unit)
            drafts.append(
                _draft(
                    group,
                    move,
                    layers,
                    tokens.num_tokens,
                    _end(group, move, layers, tokens, from_, source, offset),
                    _end(group, move, layers, tokens, into, target, offset),
                )
            )
            offset += _demand_fits(
                tokens.num_tokens * len(layers) * len(move.units) * group.unit_bytes
            )
    return Outline(tuple(drafts))


def _clipped(plan: Plan, move: Move, request: Request, block: Block) -> tuple[Move, Tokens]:
    """The part of a move that lies in the block, and its tokens, which may be none."""
    layers = move.layers.intersect(block.layers)
    if move.group != block.group or not plan.spec.group(move.group).layers_in(layers):
        return move, Tokens(0, 0)
    return replace(move, layers=layers), plan.tokens_of(move, request).clip(block.tokens)


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
    """What the plan says about one end: its layout, its shards, its first unit."""

    layout: Layout
    shards: tuple[Shard, ...]
    unit: int


class _End(NamedTuple):
    """One end of a move: how its tokens are paged from which page on, and where each tensor is."""

    cadence: PageCut
    page: int
    placements: tuple[Placement, ...]


# Every image has one page, so all of them share a table, by which pieces are remembered.
_IMAGE_TABLE = PageTable([0])


def _end(
    group: Group,
    move: Move,
    layers: tuple[int, ...],
    tokens: Tokens,
    rank: _Rank,
    pools: PoolMap | None,
    offset: int,
) -> _End:
    count = tokens.num_tokens
    if pools is None:
        return _End(PageCut(count, 0, 1, 0), 0, _image_placements(group, move, count, offset))
    placements = tuple(pools.of(group.name, tensor.name) for tensor in group.tensors)
    held = find_shard(rank.shards, group.name, layers[0])
    local = local_tokens(rank.layout, group, held, tokens)
    page, within = local.start
    return _End(PageCut(local.page_tokens, within, local.advance, rank.unit), page, placements)


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


class _TensorTemplate(NamedTuple):
    """One tensor of one move: the same form in each of its layers."""

    tensor: str
    source_bases: tuple[Base, ...]
    target_bases: tuple[Base, ...]
    key: FormKey


class _MoveTemplate(NamedTuple):
    """One move, but for its pages: where those begin in the request, and what is in them."""

    group: str
    source_page: int
    target_page: int
    strands: tuple[_TensorTemplate, ...]

    def moved(self, source: int, target: int) -> _MoveTemplate:
        """So many pages later."""
        return _MoveTemplate(
            self.group, self.source_page + source, self.target_page + target, self.strands
        )

    def on(self, source: Tables, target: Tables) -> Iterator[Part]:
        """On a request's pages."""
        ours = RequestPages(self.source_page, _table(source, self.group))
        theirs = RequestPages(self.target_page, _table(target, self.group))
        for tensor, source_bases, target_bases, key in self.strands:
            pieces = pieces_on(key, ours, theirs)
            yield Part(self.group, tensor, source_bases, target_bases, pieces)


def _table(tables: Tables, group: str) -> PageTable:
    if tables is None:
        return _IMAGE_TABLE
    if group not in tables:
        raise InputError(f"the request has no page table for group {group!r}; pass one")
    return tables[group]


def _draft(
    group: Group,
    move: Move,
    layers: tuple[int, ...],
    num_tokens: int,
    source: _End,
    target: _End,
) -> _MoveTemplate:
    strands = []
    for tensor, ours, theirs in zip(
        group.tensors, source.placements, target.placements, strict=True
    ):
        grid = Grid(group.name, len(move.units), tensor.unit_bytes, num_tokens)
        key = FormKey(grid, source.cadence, target.cadence, _spacing(ours), _spacing(theirs))
        bases = ours.bases_of(layers), theirs.bases_of(layers)
        strands.append(_TensorTemplate(tensor.name, *bases, key))
    return _MoveTemplate(group.name, source.page, target.page, tuple(strands))


def _spacing(at: Placement) -> Spacing:
    return Spacing(at.page_stride, at.token_stride, at.unit_stride, at.num_pages)
