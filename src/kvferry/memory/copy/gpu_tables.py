"""What the GPU copy is told: pure tables of numbers, ready to upload.

A part of a binding is a grid: layers × segments × pieces × chunks. A *chunk* is at
most ``Tile.span`` bytes of one piece, one row of a program's tile. Every segment gets
as many rows as the largest one needs, so that the kernel finds its place by division;
rows that a smaller segment lacks are masked. A table is

    a header per part, then per part: the addresses of its layers on the source and on
    the target, and five columns over its segments (source, target, length, rows, cols)

all 64-bit. Nothing here knows torch, streams or what the addresses point at.

The GPU waits for this module. So it makes few numpy calls, remembers what repeats from
request to request, and works out only what does not: the addresses and the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar

import numpy as np

from kvferry.errors import InputError
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base, Int64s

# Numbers in a part's header: tiles, layers, segments, rows of a segment, chunks of a piece,
# where in the table its arrays begin, and strides: row, then column, source before target.
HEADER = 10
# Arrays of a part: addresses of layers on both sides, then the columns, of which the third has
# the lengths.
ARRAYS = 6
LENGTHS = 3
# The kernel counts the rows of a layer, the programs and four columns in 32 bits.
MAX_COUNT = 1 << 29
# Single pieces whose lengths differ too much are cut to this many bytes.
CUT_BYTES = 64 << 10
# Fewer programs than this leave a large GPU idle at the end.
ENOUGH_PROGRAMS = 16384
# A copy of so many bytes takes longer than making another job's table.
LARGE_BYTES = 256 << 20
# The widest word that is copied at a time.
WIDEST = 16
# Regions that are recognised by their addresses. To hash more means to visit as many objects,
# none of which is in a cache when a slot has just come.
FEW = 4
# How much is remembered of each kind.
MAX_KNOWN = 256

K = TypeVar("K")
V = TypeVar("V")
# Layers and segments of each part; row and column strides of each.
Sizes = tuple[tuple[int, int], ...]
Strides = tuple[tuple[Stride, Stride], ...]


class GpuCopy(NamedTuple):
    """A binding and the addresses of the regions that it names on either side.

    Pass the same tuple of addresses again where it is the same: that is recognised fastest.
    """

    binding: Binding
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Tile(NamedTuple):
    """What a program copies at a time: ``num_rows`` rows of ``span`` bytes, in words.

    It does so in ``depth`` layers one after another, if there are enough programs.
    """

    word: int
    span: int
    num_rows: int
    num_warps: int
    depth: int


# For each word, the longest span first. A row longer than its piece leaves threads idle, so the
# first is taken whose span divides the longest piece, or else the last. Measured on an H200.
TILES = {
    16: (Tile(16, 512, 2, 1, 2), Tile(16, 256, 8, 2, 2), Tile(16, 128, 32, 4, 2)),
    8: (Tile(8, 256, 16, 4, 2), Tile(8, 64, 64, 4, 2)),
    4: (Tile(4, 128, 16, 4, 2),),
    2: (Tile(2, 64, 16, 4, 2),),
    1: (Tile(1, 32, 16, 4, 2),),
}


class KernelLaunch(NamedTuple):
    """One launch of the kernel: ``num_parts`` headers, the first of which is at ``first``."""

    tile: Tile
    first: int
    num_parts: int
    num_programs: int
    depth: int


class CopyTable(NamedTuple):
    """A launch for every kind of tile, and the numbers that they work through."""

    launches: tuple[KernelLaunch, ...]
    numbers: Int64s
    sizes: Sizes = ()

    def move_sources(self, by: int) -> None:
        """Every source region is so many bytes further on, a whole number of words."""
        for first, end in _source_layers(self.sizes):
            self.numbers[first:end] += by


class _Layers:
    """The bases of a part's layers on one side, and their addresses where they were before."""

    __slots__ = ("_by_region", "_by_regions", "bases", "offsets", "place")

    def __init__(self, bases: tuple[Base, ...]) -> None:
        self.bases = bases
        self.offsets = np.array([base.offset for base in bases], dtype=np.int64)
        places = {base.region for base in bases}
        # The region that all of them are in, if they are: a slot, or a packed pool.
        self.place = places.pop() if len(places) == 1 else None
        self._by_region: dict[int, Int64s] = {}
        self._by_regions: dict[tuple[int, ...], Int64s] = {}

    def addresses(self, regions: tuple[int, ...]) -> Int64s:
        """The address of each layer, if the regions are at these."""
        if self.place is None:
            known = self._by_regions.get(regions)
            if known is None:
                places = np.array([regions[base.region] for base in self.bases], dtype=np.int64)
                known = _remember(self._by_regions, regions, places + self.offsets)
            return known
        region = regions[self.place]
        known = self._by_region.get(region)
        if known is None:
            known = _remember(self._by_region, region, self.offsets + region)
        return known


class AddressBook:
    """Addresses of layers, remembered: walking that many objects would cost more than the rest.

    Bases, and regions if they are many, are recognised by being the same object, as they mostly
    are, or else by what they say.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[Base, Base], _Layers] = {}
        # What is kept beside the addresses keeps the identities in the key from being used again.
        self._known: dict[tuple[object, ...], tuple[Int64s, tuple[object, ...]]] = {}

    def addresses(
        self, parts: Sequence[BindingPart], sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> Int64s:
        """The address of each layer of all parts on the source, and then on the target."""
        regions = (sources, targets)
        named = [each if len(each) <= FEW else id(each) for each in regions]
        key = (*named, *[id(bases) for part in parts for bases in part[2:4]])
        known = self._known.get(key)
        if known is None:
            ours, theirs = (
                [part.source_bases for part in parts],
                [part.target_bases for part in parts],
            )
            addresses = [self._addresses(bases, sources) for bases in ours]
            addresses += [self._addresses(bases, targets) for bases in theirs]
            kept = (ours, theirs, regions)
            known = _remember(self._known, key, (np.concatenate(addresses), kept))
        return known[0]

    def _addresses(self, bases: tuple[Base, ...], regions: tuple[int, ...]) -> Int64s:
        known = self._layers.get((bases[0], bases[-1]))
        if known is None or known.bases != bases:
            known = _remember(self._layers, (bases[0], bases[-1]), _Layers(bases))
        return known.addresses(regions)


def _remember(known: dict[K, V], key: K, value: V) -> V:
    if len(known) >= MAX_KNOWN:
        known.clear()
    known[key] = value
    return value


def may_move(known: GpuCopy, job: GpuCopy) -> bool:
    """Whether the one's table is the other's but for where their only source region is."""
    if known.targets != job.targets or len(known.sources) != 1 or len(job.sources) != 1:
        return False
    return (job.sources[0] - known.sources[0]) % WIDEST == 0


def batches(jobs: Sequence[GpuCopy]) -> list[Sequence[GpuCopy]]:
    """Jobs to queue together: all of them, or first the first, if that one is large.

    Then the GPU has work while the table of the others is made. For a single other one
    that would not outweigh the pause between two launches.
    """
    if len(jobs) > 2 and _rough_bytes(jobs[0].binding) >= LARGE_BYTES:
        return [jobs[:1], jobs[1:]]
    return [jobs]


def _rough_bytes(binding: Binding) -> int:
    """The payload, if all parts and segments are like the first. Adding up would take longer."""
    if not binding.parts:
        return 0
    part = binding.parts[0]
    _, _, lengths, rows, cols, *_ = part.pieces
    each = int(lengths[0]) * int(rows[0]) * int(cols[0])
    return len(binding.parts) * part.num_layers * len(lengths) * each


def table_of(
    jobs: Sequence[GpuCopy], book: AddressBook, room: Callable[[int], Int64s]
) -> CopyTable:
    """The table that carries out the jobs, in an array of at least that size from ``room``."""
    arrays, sizes, strides = _arrays(jobs, book)
    if not arrays:
        return CopyTable((), room(0)[:0])
    edges, skip, size = _edges(sizes)
    table = room(size)[:size]
    numbers = np.concatenate(arrays, out=table[skip:])
    # What matters of the numbers: how they are aligned, and the largest length, rows and columns.
    bits = np.bitwise_or.reduceat(numbers, edges) & 15
    most = np.maximum.reduceat(numbers, edges).reshape(-1, ARRAYS)[:, LENGTHS:]
    known = _headers(sizes, strides, bits.tobytes(), most.tobytes())
    if known.doubtful and _uneven(numbers, edges, known.doubtful):
        return table_of([_cut_job(job) for job in jobs], book, room)
    if known.largest >= MAX_COUNT:
        raise InputError("a copy of 2**29 rows or more is too large; copy fewer tokens at once")
    table[:skip] = known.headers
    return CopyTable(known.launches, table, sizes)


def _arrays(jobs: Sequence[GpuCopy], book: AddressBook) -> tuple[list[Int64s], Sizes, Strides]:
    """The arrays of every part, in the order of the table, and what the parts are like.

    Parts with the very same pieces, as K and V can have, become one with more layers.
    """
    arrays: list[Int64s] = []
    sizes: list[tuple[int, int]] = []
    strides: list[tuple[Stride, Stride]] = []
    for binding, sources, targets in jobs:
        for alike in _alike(binding.parts):
            pieces = alike[0].pieces
            addresses = book.addresses(alike, sources, targets)
            arrays += (addresses, *pieces[:5])
            sizes.append((len(addresses) // 2, len(pieces.source)))
            strides.append(pieces[5:7])
    return arrays, tuple(sizes), tuple(strides)


def _alike(parts: Sequence[BindingPart]) -> Iterable[Sequence[BindingPart]]:
    """Neighbours with the very same pieces, together."""
    if len(parts) == 2 and parts[0].pieces is parts[1].pieces:
        return (parts,)
    return [tuple(same) for _, same in groupby(parts, key=lambda part: id(part.pieces))]


class _Headers(NamedTuple):
    """Headers, the launches over them, and which parts may turn out to be uneven.

    ``largest`` is the largest number of rows or programs that the kernel would count.
    """

    headers: Int64s
    launches: tuple[KernelLaunch, ...]
    doubtful: tuple[int, ...]
    largest: int


class _Part(NamedTuple):
    """What the header of a part is made from."""

    size: tuple[int, int]
    strides: tuple[Stride, Stride]
    begin: int
    bits: int
    longest: int
    rows: int
    cols: int


@lru_cache(maxsize=MAX_KNOWN)
def _edges(sizes: Sizes) -> tuple[Int64s, int, int]:
    """Where each array begins after the headers, where they end, and how large the table is."""
    lengths = [(2 * num_layers,) + (num_segments,) * 5 for num_layers, num_segments in sizes]
    *edges, end = accumulate((n for part in lengths for n in part), initial=0)
    skip = HEADER * len(sizes)
    return np.array(edges), skip, skip + end


@lru_cache(maxsize=MAX_KNOWN)
def _source_layers(sizes: Sizes) -> list[tuple[int, int]]:
    """Where in the table the addresses of each part's layers on the source are."""
    edges, skip, _ = _edges(sizes)
    begins = (edges[::ARRAYS] + skip).tolist()
    return [(begin, begin + size[0]) for begin, size in zip(begins, sizes, strict=True)]


@lru_cache(maxsize=MAX_KNOWN)
def _headers(sizes: Sizes, strides: Strides, bits: bytes, most: bytes) -> _Headers:
    """The headers of parts like these. Arrays come as bytes, to be remembered by."""
    edges, skip, _ = _edges(sizes)
    offset_bits = np.frombuffer(bits, dtype=np.int64).reshape(-1, ARRAYS)[:, : LENGTHS + 1]
    columns = (
        sizes,
        strides,
        (edges[::ARRAYS] + skip).tolist(),
        np.bitwise_or.reduce(offset_bits, axis=1).tolist(),
        *np.frombuffer(most, dtype=np.int64).reshape(-1, 3).T.tolist(),
    )
    parts = [_Part(*row) for row in zip(*columns, strict=True)]
    single = [i for i, part in enumerate(parts) if part.rows == part.cols == 1]
    doubtful = tuple(i for i in single if parts[i].longest > CUT_BYTES)
    headers, launches = _arranged([_grid(part) for part in parts])
    num_rows = [num_segments * each for _, _, num_segments, each, *_ in headers]
    largest = max([*num_rows, *[launch.num_programs for launch in launches]])
    return _Headers(np.array(headers).reshape(-1), launches, doubtful, largest)


def _grid(part: _Part) -> tuple[Tile, list[int]]:
    """A part's tile and header."""
    (num_layers, num_segments), (row, col) = part.size, part.strides
    tile = tile_of(_word(part), part.longest)
    chunks = -(-part.longest // tile.span)
    per_segment = part.rows * part.cols * chunks
    num_tiles = -(-num_segments * per_segment // tile.num_rows)
    counts = [num_tiles, num_layers, num_segments, per_segment, chunks]
    return tile, [*counts, part.begin, *row, *col]


def _word(part: _Part) -> int:
    """The widest word that divides every address, offset, length and stride."""
    row, col = part.strides
    every = WIDEST | part.bits
    # A stride that is never taken must not narrow the words.
    if part.rows > 1:
        every |= row.source | row.target
    if part.cols > 1:
        every |= col.source | col.target
    return every & -every


def tile_of(word: int, longest: int) -> Tile:
    """The tile for pieces of up to ``longest`` bytes."""
    tiles = TILES[word]
    return next((tile for tile in tiles if longest % tile.span == 0), tiles[-1])


def _arranged(
    grids: list[tuple[Tile, list[int]]],
) -> tuple[list[list[int]], tuple[KernelLaunch, ...]]:
    """The headers, those of one tile next to each other, and a launch for each tile."""
    headers: list[list[int]] = []
    launches = []
    for tile in dict.fromkeys(tile for tile, _ in grids):
        alike = [header for its, header in grids if its == tile]
        launches.append(_launch(tile, len(headers) * HEADER, alike))
        headers += alike
    return headers, tuple(launches)


def _launch(tile: Tile, first: int, headers: list[list[int]]) -> KernelLaunch:
    most = max(num_tiles * num_layers for num_tiles, num_layers, *_ in headers) * len(headers)
    depth = max(1, min(tile.depth, most // ENOUGH_PROGRAMS))
    deep = max(num_tiles * -(-num_layers // depth) for num_tiles, num_layers, *_ in headers)
    return KernelLaunch(tile, first, len(headers), deep * len(headers), depth)


def _uneven(numbers: Int64s, edges: Int64s, doubtful: tuple[int, ...]) -> bool:
    """Whether most rows would be empty: runs of merged pages of very different lengths."""
    starts = [i * ARRAYS + LENGTHS for i in doubtful]
    columns = [numbers[edges[i] : edges[i + 1]] for i in starts]
    return any(len(column) * int(column.max()) > 2 * int(column.sum()) for column in columns)


def _cut_job(job: GpuCopy) -> GpuCopy:
    parts = (part._replace(pieces=_cut(part.pieces)) for part in job.binding.parts)
    return job._replace(binding=Binding(tuple(parts)))


def _cut(pieces: Pieces) -> Pieces:
    """Segments of one piece cut to at most ``CUT_BYTES`` each; others are left alone."""
    if pieces.num_pieces != len(pieces.lengths):
        return pieces
    counts = -(-pieces.lengths // CUT_BYTES)
    segment = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)) * CUT_BYTES
    return pieces._replace(
        source=pieces.source[segment] + begin,
        target=pieces.target[segment] + begin,
        lengths=np.minimum(pieces.lengths[segment] - begin, CUT_BYTES),
        rows=pieces.rows[segment],
        cols=pieces.cols[segment],
    )
