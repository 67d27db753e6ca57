"""Cells of content: what a proof of a room compares, and where each end keeps it.

A **cell** is one layer of one group for a span of tokens, as far as one source sends it to one
target. Both ends compute a checksum of each chosen cell from their own pages. Cells and the
coordinates in their checksums do not depend on sharding, pages or order in memory, so equal content
has equal sums (docs/protocol.md, "Proof of content").

The entries of a cell are located token by token, without the segments and pieces of ``bind``, so
that a mistake there is found too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.ids import MAX_ID
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard, find_shard
from kvferry.layout.pages import local_tokens
from kvferry.layout.tokens import Tokens
from kvferry.plan.bind import RankPair
from kvferry.plan.places import Base, Int64s, PageTable, Placement, PoolMap
from kvferry.plan.plan import Block, Move, Plan, Request
from kvferry.plan.token_index import num_below, positions_of

Words = NDArray[np.uint64]

# All cells of a room. A share is a part of them.
ALL_CELLS = 1 << 16
# Spans are lengthened until a source has at most so many cells for a target, if its layers allow.
MAX_CELLS = 4096
MIN_SPAN_TOKENS = 256
# An entry is cut into chunks of this many bytes, with a pair of keys for every word.
CHUNK_BYTES = 4096
# Tokens that are located at once, some tenths of a millisecond.
STEP_TOKENS = 8192
NOT_CHOSEN = -1
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


class ProofRequest(msgspec.Struct, frozen=True, array_like=True):
    """A target's request to prove a room's content: ``share`` of ``ALL_CELLS`` cells."""

    seed: Annotated[int, Meta(ge=0, le=MAX_ID)]
    share: Annotated[int, Meta(ge=1, le=ALL_CELLS)]


def room_proof(origin: int, number: int, rooms: float, share: float) -> ProofRequest | None:
    """Return the proof to ask for of a room, or None for a room that is not chosen.

    ``origin`` and ``number`` are unique to the room: a target's random incarnation and its counter
    of attempts. ``rooms`` and ``share`` are the parts of rooms, and of their cells, to prove.
    """
    if not rooms or not share:
        return None
    # Every room comes here, and integers cost less than arrays of one word.
    drawn = _mixed(origin + number * GOLDEN)
    if drawn >= rooms * 2.0**64:
        return None
    return ProofRequest(_mixed(drawn + GOLDEN) & MAX_ID, max(1, round(share * ALL_CELLS)))


def _mixed(word: int) -> int:
    """Return ``mix`` of the lower 64 bits of an integer."""
    word &= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def mix(words: Words) -> Words:
    """Return the finalizer of SplitMix64 of each word. It is a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def chunk_keys(seed: int) -> Words:
    """Return the keys of the words of a chunk: those of the first sum, then of the second."""
    index = np.arange(1, 2 * (CHUNK_BYTES // 8) + 1, dtype=np.uint64)
    return mix(np.uint64(seed) + index * np.uint64(GOLDEN))


def labels(seed: int, group: int, tensor: int, layers: tuple[int, ...]) -> Words:
    """Return the label of a tensor of a group, by their places in the cache, in each layer."""
    place = np.uint64(group << 48 | tensor << 32)
    return mix(np.uint64(seed) ^ (place | np.array(layers, dtype=np.uint64)))


# ---------------------------------------------------------------- cells


class BlockCells(NamedTuple):
    """The cells of one block, as layers by spans of tokens, and which of them are chosen."""

    block: Block
    layers: tuple[int, ...]
    spans: tuple[Span, ...]
    chosen: NDArray[np.bool_]


@lru_cache(maxsize=64)
def cells_between(
    plan: Plan, pair: RankPair, request: Request, proof: ProofRequest
) -> tuple[BlockCells, ...]:
    """Return the cells of what ``pair.source`` sends ``pair.target`` for a request.

    Cached, because machine and endpoint ask for the same cells.
    """
    blocks = plan.blocks(*pair, request)
    layers = [plan.spec.group(block.group).layers_in(block.layers) for block in blocks]
    size = MIN_SPAN_TOKENS
    while (
        sum(len(some) * _num_spans(block, size) for some, block in zip(layers, blocks, strict=True))
        > MAX_CELLS
    ) and any(_num_spans(block, size) > 1 for block in blocks):
        size *= 2
    return tuple(
        _block_cells(plan, block, some, size, proof)
        for block, some in zip(blocks, layers, strict=True)
    )


def num_chosen(cells: tuple[BlockCells, ...]) -> int:
    """Return the number of chosen cells."""
    return sum(int(one.chosen.sum()) for one in cells)


def _num_spans(block: Block, size: int) -> int:
    return (block.tokens.end - 1) // size - block.tokens.first // size + 1


def _block_cells(
    plan: Plan, block: Block, layers: tuple[int, ...], size: int, proof: ProofRequest
) -> BlockCells:
    first = block.tokens.first // size
    numbers = np.arange(first, first + _num_spans(block, size), dtype=np.uint64)
    spans = tuple(
        Span(number * size, (number + 1) * size).intersect(block.tokens)
        for number in numbers.tolist()
    )
    # As the labels of a tensor that no group can have.
    rows = labels(proof.seed, _group_index(plan, block.group), (1 << 16) - 1, layers)
    chosen = mix(rows[:, None] + numbers) >> np.uint64(48) < np.uint64(proof.share)
    chosen.flags.writeable = False
    return BlockCells(block, layers, spans, chosen)


def _group_index(plan: Plan, name: str) -> int:
    return next(i for i, group in enumerate(plan.spec.groups) if group.name == name)


def describe_cells(cells: tuple[BlockCells, ...], wrong: NDArray[np.bool_]) -> str:
    """Return groups, layers and tokens of the chosen cells that are ``wrong``, for people."""
    texts, at = [], 0
    for one in cells:
        rows, columns = np.nonzero(one.chosen)
        mine = wrong[at : at + len(rows)]
        at += len(rows)
        if mine.any():
            layers = sorted({one.layers[row] for row in rows[mine]})
            first, last = (one.spans[i] for i in (columns[mine].min(), columns[mine].max()))
            texts.append(
                f"group {one.block.group!r} layers {_listed(layers)} "
                f"tokens {first.first}..{last.end - 1}"
            )
    return "; ".join(texts)


def _listed(numbers: list[int]) -> str:
    """Return ascending numbers as ``1, 3..5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


# ---------------------------------------------------------------- entries


class CellEntries(NamedTuple):
    """The entries of one tensor in some columns of cells: the same tokens and units of some layers.

    Token ``i`` is at position ``positions[i]`` of the request, and its first unit is ``offsets[i]``
    bytes behind a base. The tokens of column ``j`` are those from ``edges[j]`` to ``edges[j + 1]``.
    ``cells[i, j]`` is the index of the cell of layer ``i`` and column ``j`` among the chosen ones,
    or ``NOT_CHOSEN``. ``at`` is where the tensor lies.
    """

    cells: Int64s
    edges: Int64s
    bases: tuple[Base, ...]
    labels: Words
    offsets: Int64s
    positions: Int64s
    units: Span
    at: Placement
    unit_bytes: int
    element_bytes: int

    @property
    def element_stride(self) -> int:
        """Bytes from an element of a unit to the next."""
        return self.at.element_stride or self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return len(self.offsets) * len(self.units) * self.unit_bytes

    def columns(self) -> Iterator[CellEntries]:
        """Yield each column that has tokens, with the layers whose cell in it is chosen."""
        if len(self.edges) == 2 and NOT_CHOSEN not in self.cells:
            yield self
            return
        for index in np.flatnonzero(np.diff(self.edges)).tolist():
            yield self._column(index)

    def _column(self, index: int) -> CellEntries:
        rows = np.flatnonzero(self.cells[:, index] != NOT_CHOSEN)
        first, end = self.edges[index : index + 2].tolist()
        return self._replace(
            cells=self.cells[rows, index : index + 1],
            edges=np.array([0, end - first]),
            bases=tuple(self.bases[row] for row in rows.tolist()),
            labels=self.labels[rows],
            offsets=self.offsets[first:end],
            positions=self.positions[first:end],
        )


class ContentView(NamedTuple):
    """One end of a proof: a rank's layout and shards, its pools and the request's pages."""

    layout: Layout
    shards: tuple[Shard, ...]
    pools: PoolMap
    tables: Mapping[str, PageTable]


def cell_entries(
    plan: Plan, pair: RankPair, request: Request, proof: ProofRequest, view: ContentView
) -> Iterator[CellEntries]:
    """Yield the entries of the chosen cells in one end's pages.

    Raises ``InputError`` if a page table is wrong.
    """
    first_cell = 0
    for one in cells_between(plan, pair, request, proof):
        numbers = np.cumsum(one.chosen.ravel()).reshape(one.chosen.shape) - 1 + first_cell
        numbers[~one.chosen] = NOT_CHOSEN
        first_cell += int(one.chosen.sum())
        for some in _columns(one, numbers):
            for move in plan.between(*pair):
                if move.group == one.block.group and one.layers[0] in move.layers:
                    tokens = plan.tokens_of(move, request).clip(some.tokens)
                    if tokens.num_tokens:
                        yield from _move_entries(plan, move, tokens, some, proof, view)


class _CellColumns(NamedTuple):
    """Some columns of a block's cells, with the layers in which any of these is chosen."""

    layers: tuple[int, ...]
    spans: tuple[Span, ...]
    numbers: Int64s

    @property
    def tokens(self) -> Span:
        """All tokens of the columns."""
        return Span(self.spans[0].first, self.spans[-1].end)


def _columns(cells: BlockCells, numbers: Int64s) -> Iterator[_CellColumns]:
    """Cut a block's cells into columns of about ``STEP_TOKENS`` together."""
    width = max(1, STEP_TOKENS // max(map(len, cells.spans)))
    for first in range(0, len(cells.spans), width):
        some = slice(first, first + width)
        rows = np.flatnonzero(cells.chosen[:, some].any(axis=1))
        if len(rows):
            layers = tuple(cells.layers[row] for row in rows.tolist())
            yield _CellColumns(layers, cells.spans[some], numbers[rows, some])


def _move_entries(
    plan: Plan,
    move: Move,
    tokens: Tokens,
    columns: _CellColumns,
    proof: ProofRequest,
    view: ContentView,
) -> Iterator[CellEntries]:
    group = plan.spec.group(move.group)
    shard = find_shard(view.shards, group.name, columns.layers[0])
    local = local_tokens(view.layout, group, shard, tokens)
    positions = positions_of(tokens)
    below = num_below(local.held, positions)
    page, place = np.divmod(local.first + below - below[0], local.page_tokens)
    pages = _pages(view.tables, group.name, page)
    firsts = [*(span.first for span in columns.spans), columns.tokens.end]
    edges = np.searchsorted(positions, firsts)
    unit = move.units.first - shard.units.first
    # Tensors with equal strides share their offsets.
    offsets: dict[tuple[int, ...], Int64s] = {}
    for index, tensor in enumerate(group.tensors):
        at = view.pools.of(group.name, tensor.name)
        if pages.min() < 0 or pages.max() >= at.num_pages:
            raise InputError(f"group {group.name!r} names a page outside of its pool")
        strides = at.page_stride, at.token_stride, at.unit_stride
        if strides not in offsets:
            offsets[strides] = pages * strides[0] + place * strides[1] + unit * strides[2]
        yield CellEntries(
            columns.numbers,
            edges,
            at.bases_of(columns.layers),
            labels(proof.seed, _group_index(plan, group.name), index, columns.layers),
            offsets[strides],
            positions,
            move.units,
            at,
            tensor.unit_bytes,
            tensor.dtype.num_bytes,
        )


def _pages(tables: Mapping[str, PageTable], group: str, index: Int64s) -> Int64s:
    table = tables.get(group)
    if table is None or index[0] < table.first_page or index[-1] >= table.end_page:
        raise InputError(
            f"group {group!r} lacks pages {index[0]}..{index[-1]} of the request; give every page"
        )
    return table.pages[index - table.first_page]
