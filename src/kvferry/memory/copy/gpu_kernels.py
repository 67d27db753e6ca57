"""The GPU kernel: copies tiles of bound pieces as a table says.

A program copies the tile of ``num_rows`` chunks at one place of a part, in ``depth`` layers one
after another. It finds the place once, and the layers differ only in their addresses.
``gpu_tables`` describes the table. Only GPU hosts import this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.memory.copy import gpu_tables

HEADER = tl.constexpr(gpu_tables.HEADER)


@triton.jit(do_not_specialize=["num_parts", "depth"])
def copy_tiles(
    headers: tl.tensor,
    table: tl.tensor,
    num_parts: tl.tensor,
    depth: tl.tensor,
    word: tl.constexpr,
    span: tl.constexpr,
    num_rows: tl.constexpr,
) -> None:
    """Copy one tile of one part in ``depth`` layers.

    ``word``: every address, length and stride is a multiple of this many bytes.
    ``span``: bytes in a row of the tile.
    """
    # Every part has as many programs as the largest one needs.
    programs = tl.num_programs(0) // num_parts
    tile = tl.program_id(0) % programs
    header = headers + (tl.program_id(0) // programs) * HEADER
    num_tiles = tl.load(header).to(tl.int32)
    num_layers = tl.load(header + 1).to(tl.int32)
    num_segments = tl.load(header + 2).to(tl.int32)
    rows_per_segment = tl.load(header + 3).to(tl.int32)
    chunks = tl.load(header + 4).to(tl.int32)
    layers = table + tl.load(header + 5)
    first = tile // num_tiles * depth
    if first >= num_layers:
        return
    index = tile % num_tiles * num_rows + tl.arange(0, num_rows)
    segment = index // rows_per_segment
    piece = index % rows_per_segment // chunks
    live = segment < num_segments
    column = layers + 2 * num_layers + segment
    source = tl.load(column, mask=live, other=0)
    target = tl.load(column + num_segments, mask=live, other=0)
    length = tl.load(column + 2 * num_segments, mask=live, other=0)
    rows = tl.load(column + 3 * num_segments, mask=live, other=0).to(tl.int32)
    cols = tl.load(column + 4 * num_segments, mask=live, other=1).to(tl.int32)
    row = piece // cols
    col = piece % cols
    begin = (index % chunks).to(tl.int64) * span
    source += row * tl.load(header + 6) + col * tl.load(header + 8) + begin
    target += row * tl.load(header + 7) + col * tl.load(header + 9) + begin
    # Triton has no 16-byte type. Pairs of 8 bytes that are said to be aligned become one access.
    narrow: tl.constexpr = tl.int16 if word == 2 else tl.int8
    element: tl.constexpr = tl.int64 if word >= 8 else (tl.int32 if word == 4 else narrow)
    size: tl.constexpr = element.primitive_bitwidth // 8
    at = tl.arange(0, span // size)[None, :]
    left = tl.where(row < rows, length - begin, 0) // size
    mask = tl.max_constancy(at < left[:, None], (1, word // size))
    for layer in range(first, min(first + depth, num_layers)):
        from_ = (tl.load(layers + layer) + source).to(tl.pointer_type(element))
        into = (tl.load(layers + num_layers + layer) + target).to(tl.pointer_type(element))
        reads = tl.multiple_of(from_[:, None] + at, (1, word))
        writes = tl.multiple_of(into[:, None] + at, (1, word))
        tl.store(writes, tl.load(reads, mask=mask), mask=mask)
