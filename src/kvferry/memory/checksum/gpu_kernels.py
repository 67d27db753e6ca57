"""The GPU kernel of checksums: adds the values of entries as a table says.

A program adds one chunk of each row of a tile, and then adds their sum to that of the cell.
``gpu_tables`` describes the table, and docs/protocol.md the value of a chunk. Only GPU hosts import
this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.memory.checksum import gpu_tables
from kvferry.plan import content as definition

HEADER = tl.constexpr(gpu_tables.HEADER)
ITEM = tl.constexpr(gpu_tables.ITEM)
NUM_KEYS = tl.constexpr(gpu_tables.NUM_KEYS)
CHUNK_BYTES = tl.constexpr(definition.CHUNK_BYTES)


@triton.jit
def mix(word: tl.tensor) -> tl.tensor:
    """Return the finalizer of SplitMix64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def product(word: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return the product of both halves of a word, each added to that of the key."""
    low = word.to(tl.uint32) + key.to(tl.uint32)
    high = (word >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def words_of(
    address: tl.tensor,
    end: tl.tensor,
    index: tl.tensor,
    element_bytes: tl.tensor,
    element_stride: tl.tensor,
    word: tl.constexpr,
    is_strided: tl.constexpr,
) -> tl.tensor:
    """Return the words with these indices of units at these addresses.

    Bytes from ``end`` of a unit on count as zeros.
    """
    if is_strided or word < 8:
        size: tl.constexpr = 8 if word >= 8 else word
        narrow: tl.constexpr = tl.uint16 if size == 2 else tl.uint8
        wide: tl.constexpr = tl.uint64 if size == 8 else tl.uint32
        kind: tl.constexpr = wide if size >= 4 else narrow
        words = tl.zeros((address.shape[0], index.shape[0]), tl.uint64)
        for piece in tl.static_range(8 // size):
            at = index * 8 + piece * size
            place = at.to(tl.int64)
            if is_strided:
                place = at // element_bytes * element_stride + at % element_bytes
            reads = (address[:, None] + place[None, :]).to(tl.pointer_type(kind))
            found = tl.load(reads, mask=at[None, :] < end[:, None], other=0)
            words |= found.to(tl.uint64) << (8 * size * piece)
    else:
        # Pairs of 8 bytes that are said to be aligned become one access.
        reads = address.to(tl.pointer_type(tl.uint64))[:, None] + index[None, :]
        mask = tl.max_constancy(index[None, :] * 8 < end[:, None], (1, word // 8))
        words = tl.load(tl.multiple_of(reads, (1, word)), mask=mask, other=0)
    return words


@triton.jit(do_not_specialize=["first"])
def sum_chunks(
    table: tl.tensor,
    state: tl.tensor,
    first: tl.tensor,
    word: tl.constexpr,
    width: tl.constexpr,
    num_rows: tl.constexpr,
    is_strided: tl.constexpr,
) -> None:
    """Add one chunk of each row of a tile. ``first`` is the launch's first item.

    ``state`` has the keys, and behind them the sums of all cells.
    """
    num_tiles = tl.load(table).to(tl.int32)
    num_chunks = tl.load(table + 1).to(tl.int32)
    num_units = tl.load(table + 2).to(tl.int32)
    program = tl.program_id(0)
    item = table + HEADER + (first + program // (num_tiles * num_chunks)) * ITEM
    chunk = program % num_chunks
    tile = program // num_chunks % num_tiles
    num_tokens = tl.load(item + 4).to(tl.int32)
    if tile * num_rows >= num_tokens * num_units:
        return
    row = tile * num_rows + tl.arange(0, num_rows)
    live = row < num_tokens * num_units
    # Rows follow memory.
    by_unit = tl.load(table + 3) != 0
    inner = tl.where(by_unit, num_tokens, num_units)
    token = tl.where(by_unit, row % inner, row // inner)
    unit = tl.where(by_unit, row // inner, row % inner)
    token += tl.load(item + 3).to(tl.int32)
    offset = tl.load(table + tl.load(table + 9) + token, mask=live, other=0)
    position = tl.load(table + tl.load(table + 10) + token, mask=live, other=0)
    address = tl.load(item) + offset + unit * tl.load(table + 5)
    place = position << 31 | (tl.load(table + 4) + unit) << 15 | chunk
    label = tl.load(item + 1).to(tl.uint64, bitcast=True)
    begin = chunk * CHUNK_BYTES
    length = tl.minimum(tl.load(table + 6).to(tl.int32) - begin, CHUNK_BYTES)
    end = tl.where(live, begin + length, 0)
    element_bytes = tl.load(table + 7).to(tl.int32)
    element_stride = tl.load(table + 8)
    low = tl.zeros((num_rows, width), tl.uint64)
    high = tl.zeros((num_rows, width), tl.uint64)
    for start in range(0, (length + 7) // 8, width):
        at = start + tl.arange(0, width)
        index = begin // 8 + at
        words = words_of(address, end, index, element_bytes, element_stride, word, is_strided)
        # Without a key, a word that does not exist adds nothing.
        keys = state + at
        low_key = tl.load(keys, mask=at * 8 < length, other=0)
        high_key = tl.load(keys + NUM_KEYS // 2, mask=at * 8 < length, other=0)
        low += product(words, low_key.to(tl.uint64, bitcast=True)[None, :])
        high += product(words, high_key.to(tl.uint64, bitcast=True)[None, :])
    value = mix(label + place.to(tl.uint64, bitcast=True))
    value = mix(mix(tl.sum(low, 1) + value) + tl.sum(high, 1))
    total = tl.sum(tl.where(live, value, 0), 0)
    cell = state + NUM_KEYS + tl.load(item + 2)
    tl.atomic_add(cell, total.to(tl.int64, bitcast=True), sem="relaxed")
