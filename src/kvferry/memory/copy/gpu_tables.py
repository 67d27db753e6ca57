"""Tables that tell the GPU kernel what to copy.

A part of a binding is a grid: layers × segments × pieces × chunks. A *chunk* is a row of a
program's tile: at most ``Tile.span`` bytes of one piece. All segments get as many rows as the
largest one needs, so that the kernel finds its place by division. Missing rows of smaller segments
are masked. A table of 64-bit numbers has

    a header for each part, then for each part: the addresses of its layers on the source and on
    the target, and five columns over its segments (source, target, length, rows, cols)

The GPU waits for this module. So it makes few numpy calls, caches what repeats from request to
request, and computes only the addresses and the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from kvferry.errors import InputError
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base, Int64s

# Numbers in a part's header: tiles, layers, segments, rows of a segment, chunks of a piece,
# where in the table its arrays begin, and strides: row, then column, source before target.
HEADER = 10
# Arrays of a part: addresses of layers on both sides, then the columns. Index of the lengths.
ARRAYS = 6
LENGTHS = 3
# The kernel counts the rows of a layer, programs and four columns in 32 bits.
MAX_COUNT = 1 << 29
# Segments of one piece whose lengths differ too much are cut to this size.
CUT_BYTES = 64 << 10
# Fewer programs than this leave a large GPU idle at the end.
ENOUGH_PROGRAMS = 16384
# A copy of this size takes longer than making another job's table.
LARGE_BYTES = 256 << 20
# The widest word that a thread copies at a time.
WIDEST = 16
# Tuples of up to this many regions are cached by value, longer ones by identity. Hashing many
# integers means many cache misses.
MAX_HASHED_REGIONS = 4
# Entries of each cache.
MAX_CACHED = 256

K = TypeVar("K")
V = TypeVar("V")
# Layers and segments of each part; row and column strides of each.
Sizes = tuple[tuple[int, int], ...]
Strides = tuple[tuple[Stride, Stride], ...]


class GpuCopy(NamedTuple):
    """A binding, and the addresses of its source and target regions.

    Pass the same tuple object for the same addresses, because lookups by identity are fastest.
    """

    binding: Binding
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Tile(NamedTuple):
    """The bytes that a program copies at a time: ``num_rows`` rows of ``span`` bytes, in words.

    It repeats that for ``depth`` layers, if there are enough programs.
    """

    word: int
    span: int
    num_rows: int
    num_warps: int
    depth: int


# By word, the longest span first. A row longer than its piece leaves threads idle, so the first
# tile whose span divides the longest piece is used, or else the last. Measured on an H200.
TILES = {
    16: (Tile(16, 512, 2, 1, 2), Tile(16, 256, 8, 2, 2), Tile(16, 128, 32, 4, 2)),
    8: (Tile(8, 256, 16, 4, 2), Tile(8, 64, 64, 4, 2)),
    4: (Tile(4, 128, 16, 4, 2),),
    2: (Tile(2, 64, 16, 4, 2),),
    1: (Tile(1, 32, 16, 4, 2),),
}


class KernelLaunch(NamedTuple):
    """One launch of the kernel for ``num_parts`` headers, the first of them at index ``first``."""

    tile: Tile
    first: int
    num_parts: int
    num_programs: int
    depth: int


class CopyTable(NamedTuple):
    """The numbers of a table, and a kernel launch for each kind of tile in it."""

    launches: tuple[KernelLaunch, ...]
    numbers: Int64s
    sizes: Sizes = ()

    def move_sources(self, by: int) -> None:
        """Add ``by``, a multiple of ``WIDEST``, to the addresses of all source regions."""
        for first, end in _source_layers(self.sizes):
            self.numbers[first:end] += by


class _LayerAddresses:
    """The bases of a part's layers on one side, with a cache of their addresses."""

    __slots__ = ("_by_region", "_by_regions", "bases", "offsets", "region")

    def __init__(self, bases: tuple[Base, ...]) -> None:
        self.bases = bases
        self.offsets = np.array([base.offset for base in bases], dtype=np.int64)
        indices = {base.region for base in bases}
        # The only region, if there is just one: a slot, or a packed pool.
        self.region = indices.pop() if len(indices) == 1 else None
        self._by_region: dict[int, Int64s] = {}
        self._by_regions: dict[tuple[int, ...], Int64s] = {}

    def addresses(self, regions: tuple[int, ...]) -> Int64s:
        """Return the address of each layer for these addresses of regions."""
        if self.region is None:
            cached = self._by_regions.get(regions)
            if cached is None:
                begins = np.array([regions[base.region] for base in self.bases], dtype=np.int64)
                cached = _cache(self._by_regions, regions, begins + self.offsets)
            return cached
        region = regions[self.region]
        cached = self._by_region.get(region)
        if cached is None:
            cached = _cache(self._by_region, region, self.offsets + region)
        return cached


class AddressCache:
    """A cache of the addresses of layers, because computing them takes longer than all the rest.

    It looks up bases, and long tuples of regions, first by identity and then by value.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[Base, Base], _LayerAddresses] = {}
        # The values hold the objects in the key, so that their identities are not reused.
        self._cached: dict[tuple[object, ...], tuple[Int64s, tuple[object, ...]]] = {}

    def addresses(
        self, parts: Sequence[BindingPart], sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> Int64s:
        """Return the address of each layer of all parts on the source, then on the target."""
        regions = (sources, targets)
        named = [each if len(each) <= MAX_HASHED_REGIONS else id(each) for each in regions]
        key = (*named, *[id(bases) for part in parts for bases in part[2:4]])
        cached = self._cached.get(key)
        if cached is None:
            source_bases = [part.source_bases for part in parts]
            target_bases = [part.target_bases for part in parts]
            addresses = [self._addresses(bases, sources) for bases in source_bases]
            addresses += [self._addresses(bases, targets) for bases in target_bases]
            kept = (source_bases, target_bases, regions)
            cached = _cache(self._cached, key, (np.concatenate(addresses), kept))
        return cached[0]

    def _addresses(self, bases: tuple[Base, ...], regions: tuple[int, ...]) -> Int64s:
        cached = self._layers.get((bases[0], bases[-1]))
        if cached is None or cached.bases != bases:
            cached = _cache(self._layers, (bases[0], bases[-1]), _LayerAddresses(bases))
        return cached.addresses(regions)


def _cache(entries: dict[K, V], key: K, value: V) -> V:
    if len(entries) >= MAX_CACHED:
        entries.clear()
    entries[key] = value
    return value


def can_move_sources(prebound: GpuCopy, job: GpuCopy) -> bool:
    """Return whether the tables of two jobs differ only in the address of a single source region.

    The jobs have the same binding.
    """
    if prebound.targets != job.targets or len(prebound.sources) != 1 or len(job.sources) != 1:
        return False
    return (job.sources[0] - prebound.sources[0]) % WIDEST == 0


def batches(jobs: Sequence[GpuCopy]) -> list[Sequence[GpuCopy]]:
    """Return the jobs in batches to queue together: all, or a large first job and the others.

    The GPU copies the large job while the table of the others is made. For a single other job,
    the pause between two launches would cost more.
    """
    if len(jobs) > 2 and _rough_bytes(jobs[0].binding) >= LARGE_BYTES:
        return [jobs[:1], jobs[1:]]
    return [jobs]


def _rough_bytes(binding: Binding) -> int:
    """Estimate the bytes from the first part and segment, because a sum would take longer."""
    if not binding.parts:
        return 0
    part = binding.parts[0]
    _, _, lengths, rows, cols, *_ = part.pieces
    each = int(lengths[0]) * int(rows[0]) * int(cols[0])
    return len(binding.parts) * part.num_layers * len(lengths) * each


def table_of(
    jobs: Sequence[GpuCopy], cache: AddressCache, allocate: Callable[[int], Int64s]
) -> CopyTable:
    """Return the table of these jobs. ``allocate`` returns an array of at least the given size."""
    arrays, sizes, strides = _arrays(jobs, cache)
    if not arrays:
        return CopyTable((), allocate(0)[:0])
    edges, skip, size = _edges(sizes)
    table = allocate(size)[:size]
    numbers = np.concatenate(arrays, out=table[skip:])
    # The headers depend on alignments, and on the largest length, rows and columns.
    bits = np.bitwise_or.reduceat(numbers, edges) & 15
    most = np.maximum.reduceat(numbers, edges).reshape(-1, ARRAYS)[:, LENGTHS:]
    cached = _headers(sizes, strides, bits.tobytes(), most.tobytes())
    if cached.doubtful and _uneven(numbers, edges, cached.doubtful):
        return table_of([_cut_job(job) for job in jobs], cache, allocate)
    if cached.largest >= MAX_COUNT:
        raise InputError("a copy of 2**29 rows or more is too large; copy fewer tokens at once")
    table[:skip] = cached.headers
    return CopyTable(cached.launches, table, sizes)


def _arrays(jobs: Sequence[GpuCopy], cache: AddressCache) -> tuple[list[Int64s], Sizes, Strides]:
    """Return the arrays of every part in the order of the table, and the parts' sizes and strides.

    Parts that share their pieces become one part with more layers.
    """
    arrays: list[Int64s] = []
    sizes: list[tuple[int, int]] = []
    strides: list[tuple[Stride, Stride]] = []
    for binding, sources, targets in jobs:
        for parts in binding.parts_by_pieces():
            pieces = parts[0].pieces
            addresses = cache.addresses(parts, sources, targets)
            arrays += (addresses, *pieces[:5])
            sizes.append((len(addresses) // 2, len(pieces.source)))
            strides.append(pieces[5:7])
    return arrays, tuple(sizes), tuple(strides)


class _TableHeaders(NamedTuple):
    """The headers of a table and the launches over them.

    ``doubtful`` are the parts whose pieces may be uneven. ``largest`` is the largest number of
    rows or programs.
    """

    headers: Int64s
    launches: tuple[KernelLaunch, ...]
    doubtful: tuple[int, ...]
    largest: int


class _PartSummary(NamedTuple):
    """The facts that decide a part's header. ``bits`` is the bitwise or of its numbers."""

    size: tuple[int, int]
    strides: tuple[Stride, Stride]
    begin: int
    bits: int
    longest: int
    rows: int
    cols: int


@lru_cache(maxsize=MAX_CACHED)
def _edges(sizes: Sizes) -> tuple[Int64s, int, int]:
    """Return where each array begins after the headers, and the sizes of headers and table."""
    lengths = [(2 * num_layers,) + (num_segments,) * 5 for num_layers, num_segments in sizes]
    *edges, end = accumulate((n for part in lengths for n in part), initial=0)
    skip = HEADER * len(sizes)
    return np.array(edges), skip, skip + end


@lru_cache(maxsize=MAX_CACHED)
def _source_layers(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the ranges of the table with the source addresses of each part."""
    edges, skip, _ = _edges(sizes)
    begins = (edges[::ARRAYS] + skip).tolist()
    return [(begin, begin + size[0]) for begin, size in zip(begins, sizes, strict=True)]


@lru_cache(maxsize=MAX_CACHED)
def _headers(sizes: Sizes, strides: Strides, bits: bytes, most: bytes) -> _TableHeaders:
    """Return the headers of parts. Arrays are passed as bytes, because bytes can be hashed."""
    edges, skip, _ = _edges(sizes)
    offset_bits = np.frombuffer(bits, dtype=np.int64).reshape(-1, ARRAYS)[:, : LENGTHS + 1]
    columns = (
        sizes,
        strides,
        (edges[::ARRAYS] + skip).tolist(),
        np.bitwise_or.reduce(offset_bits, axis=1).tolist(),
        *np.frombuffer(most, dtype=np.int64).reshape(-1, 3).T.tolist(),
    )
    parts = [_PartSummary(*row) for row in zip(*columns, strict=True)]
    single = [i for i, part in enumerate(parts) if part.rows == part.cols == 1]
    doubtful = tuple(i for i in single if parts[i].longest > CUT_BYTES)
    headers, launches = _arranged([_grid(part) for part in parts])
    num_rows = [num_segments * each for _, _, num_segments, each, *_ in headers]
    largest = max([*num_rows, *[launch.num_programs for launch in launches]])
    return _TableHeaders(np.array(headers).reshape(-1), launches, doubtful, largest)


def _grid(part: _PartSummary) -> tuple[Tile, list[int]]:
    """Return a part's tile and header."""
    (num_layers, num_segments), (row, col) = part.size, part.strides
    tile = tile_of(_word(part), part.longest)
    chunks = -(-part.longest // tile.span)
    per_segment = part.rows * part.cols * chunks
    num_tiles = -(-num_segments * per_segment // tile.num_rows)
    counts = [num_tiles, num_layers, num_segments, per_segment, chunks]
    return tile, [*counts, part.begin, *row, *col]


def _word(part: _PartSummary) -> int:
    """Return the widest word that divides every address, offset, length and stride."""
    row, col = part.strides
    every = WIDEST | part.bits
    # Unused strides do not matter.
    if part.rows > 1:
        every |= row.source | row.target
    if part.cols > 1:
        every |= col.source | col.target
    return every & -every


def tile_of(word: int, longest: int) -> Tile:
    """Return the tile for pieces of up to ``longest`` bytes."""
    tiles = TILES[word]
    return next((tile for tile in tiles if longest % tile.span == 0), tiles[-1])


def _arranged(
    grids: list[tuple[Tile, list[int]]],
) -> tuple[list[list[int]], tuple[KernelLaunch, ...]]:
    """Return the headers sorted by tile, and a launch for each tile."""
    headers: list[list[int]] = []
    launches = []
    for tile in dict.fromkeys(tile for tile, _ in grids):
        of_tile = [header for other, header in grids if other == tile]
        launches.append(_launch(tile, len(headers) * HEADER, of_tile))
        headers += of_tile
    return headers, tuple(launches)


def _launch(tile: Tile, first: int, headers: list[list[int]]) -> KernelLaunch:
    most = max(num_tiles * num_layers for num_tiles, num_layers, *_ in headers) * len(headers)
    depth = max(1, min(tile.depth, most // ENOUGH_PROGRAMS))
    deep = max(num_tiles * -(-num_layers // depth) for num_tiles, num_layers, *_ in headers)
    return KernelLaunch(tile, first, len(headers), deep * len(headers), depth)


def _uneven(numbers: Int64s, edges: Int64s, doubtful: tuple[int, ...]) -> bool:
    """Return whether most rows would be empty, as for runs of pages of very different lengths."""
    starts = [i * ARRAYS + LENGTHS for i in doubtful]
    columns = [numbers[edges[i] : edges[i + 1]] for i in starts]
    return any(len(column) * int(column.max()) > 2 * int(column.sum()) for column in columns)


def _cut_job(job: GpuCopy) -> GpuCopy:
    parts = (part._replace(pieces=_cut(part.pieces)) for part in job.binding.parts)
    return job._replace(binding=Binding(tuple(parts)))


def _cut(pieces: Pieces) -> Pieces:
    """Return segments of one piece cut to ``CUT_BYTES`` each. Others stay unchanged."""
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
