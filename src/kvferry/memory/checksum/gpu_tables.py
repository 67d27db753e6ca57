"""Tables that tell the GPU kernel of checksums what to add.

A table is for the entries of one tensor in some columns of cells, or of several that lie alike. It
has

    a header, then an item for each chosen cell, then each token's offset and position

An item is a grid of tokens by units. The kernel cuts it into tiles of rows, and each unit's bytes
into chunks: a program adds one chunk of each row of a tile. numpy makes all items at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvferry.layout.spec import CacheSpec
from kvferry.plan.content import CHUNK_BYTES, NOT_CHOSEN, CellEntries
from kvferry.plan.places import Int64s, Placement, PoolMap

# Numbers in a header: tiles of an item, chunks of a unit, units, whether tokens are closer than
# units, the first unit's number, stride and bytes of a unit, bytes and stride of an element, and
# where in the table offsets and positions begin.
HEADER = 11
# Numbers in an item: address of the layer, label, cell, first token, number of tokens.
ITEM = 5
# Keys of a chunk's words: those of the first sum, then those of the second.
NUM_KEYS = 2 * CHUNK_BYTES // 8
WORD_BYTES = 8
# The widest word that a thread reads at a time.
WIDEST = 16
# Words in a tile, and in its rows at most: of short and of long chunks. Few threads share a narrow
# row and add it up in few steps, but a long chunk may be the only one of its entry.
TILE_WORDS, MAX_WIDTH, LONG_WIDTH, LONG_WORDS = 1024, 8, 32, 64
NUM_WARPS = 4


class SumTile(NamedTuple):
    """The part that a program adds at a time: ``num_rows`` rows of ``width`` words of 8 bytes.

    Each address, stride and length is a multiple of ``word`` bytes. The elements of a unit lie
    apart if ``is_strided``.
    """

    word: int
    width: int
    num_rows: int
    is_strided: bool


# By group and tensor.
Tiles = Mapping[tuple[str, str], SumTile]


class SumTable(NamedTuple):
    """A table with its tile, and its number of items, programs of an item, and bytes of an item."""

    tile: SumTile
    numbers: Int64s
    num_items: int
    num_programs: int
    item_bytes: int


def tiles_of(pools: PoolMap, spec: CacheSpec, addresses: Sequence[int]) -> Tiles:
    """Return the tiles of a rank's tensors. They are the same for every request."""
    tensors = {(group.name, one.name): one for group in spec.groups for one in group.tensors}
    tiles = {}
    for at in pools.placements:
        one = tensors[at.group, at.tensor]
        tile = tile_of(at, one.unit_bytes, one.dtype.num_bytes, addresses)
        tiles[at.group, at.tensor] = tile
    return tiles


def tile_of(
    at: Placement, unit_bytes: int, element_bytes: int, addresses: Sequence[int]
) -> SumTile:
    """Return the tile for a tensor."""
    stride = at.element_stride or element_bytes
    is_strided = stride != element_bytes
    every = WIDEST | at.page_stride | at.token_stride | at.unit_stride | unit_bytes
    for base in at.bases:
        every |= addresses[base.region] + base.offset
    if is_strided:
        every |= element_bytes | stride
    width = _width(-(-min(unit_bytes, CHUNK_BYTES) // WORD_BYTES))
    return SumTile(every & -every, width, TILE_WORDS // width, is_strided)


def _width(num_words: int) -> int:
    """Return the width of a tile's rows for chunks of this length."""
    if num_words > LONG_WORDS:
        return LONG_WIDTH
    return min(MAX_WIDTH, 1 << (num_words - 1).bit_length())


def joined(
    entries: Iterable[CellEntries], tiles: Tiles
) -> Iterator[tuple[SumTile, list[CellEntries]]]:
    """Put entries together that differ only in their layers, such as K and V, with their tile."""

    def shape(one: CellEntries) -> tuple[SumTile, tuple[int | None, ...]]:
        arrays = id(one.offsets), id(one.positions)
        sizes = one.at.unit_stride, one.unit_bytes, one.element_bytes, one.at.element_stride
        return tiles[one.at.group, one.at.tensor], (*arrays, *sizes)

    for (tile, _), group in groupby(entries, shape):
        yield tile, [*group]


def table_of(
    tile: SumTile,
    parts: Sequence[CellEntries],
    addresses: Sequence[int],
    allocate: Callable[[int], Int64s],
) -> SumTable:
    """Return the table of joined entries. ``allocate`` returns an array of at least a size."""
    entries = parts[0]
    cells, edges, units = entries.cells, entries.edges, len(entries.units)
    counts = np.diff(edges)
    rows, columns = np.nonzero((cells != NOT_CHOSEN) & (counts > 0))
    at, num_tokens, num_items = entries.at, len(entries.offsets), len(rows) * len(parts)
    most = int(counts.max()) * units
    num_tiles = -(-most // tile.num_rows)
    num_chunks = -(-entries.unit_bytes // CHUNK_BYTES)
    ends = np.cumsum([HEADER, num_items * ITEM, num_tokens, num_tokens]).tolist()
    numbers = allocate(ends[-1])[: ends[-1]]
    numbers[:HEADER] = (
        *(num_tiles, num_chunks, units, _tokens_are_closer(entries), entries.units.first),
        *(at.unit_stride, entries.unit_bytes, entries.element_bytes, entries.element_stride),
        *ends[1:3],
    )
    items = numbers[HEADER : ends[1]].reshape(len(parts), len(rows), ITEM)
    for part, mine in zip(parts, items, strict=True):
        begins = [addresses[base.region] + base.offset for base in part.bases]
        mine[:, 0] = np.array(begins, dtype=np.int64)[rows]
        mine[:, 1] = part.labels.view(np.int64)[rows]
    items[:, :, 2] = cells[rows, columns]
    items[:, :, 3] = edges[columns]
    items[:, :, 4] = counts[columns]
    numbers[ends[1] : ends[2]] = entries.offsets
    numbers[ends[2] :] = entries.positions
    return SumTable(tile, numbers, num_items, num_tiles * num_chunks, most * entries.unit_bytes)


def _tokens_are_closer(entries: CellEntries) -> bool:
    """Whether the tokens of a unit are next to each other in memory, not the units of a token."""
    offsets = entries.offsets
    return len(offsets) > 1 and abs(int(offsets[1] - offsets[0])) < entries.at.unit_stride
