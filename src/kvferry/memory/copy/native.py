"""The compiled loop of ``copy.cpu``: copies the same grid of pieces in every layer of a part.

numba compiles it, without a compiler on the machine. Only this module needs numba, so ``copy.cpu``
imports it late.

A memcpy call for each piece reaches only half of the memory bandwidth (docs/adr/0008), so there are
two ways to store:

- past the cache (non-temporal), for pages that are not read soon: a line that is written as a
  whole is not fetched first;
- through the cache, for a slot that is sent or scattered at once.

Pieces of one element (1, 2, 4 or 8 bytes), whose neighbours are contiguous on one side only, are
loaded and stored as numbers. Else a call for each would take longer than its copy.

Except for those, the source is prefetched a few KiB ahead, because the processor's own prefetchers
stop at the end of every short piece and every page.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Their type hints are incomplete.
numba: Any = importlib.import_module("numba")
cgutils: Any = importlib.import_module("numba.core.cgutils")
registry: Any = importlib.import_module("numba.core.registry")
extending: Any = importlib.import_module("numba.extending")
llvmlite: Any = importlib.import_module("llvmlite")
ir: Any = importlib.import_module("llvmlite.ir")

LINE = 64
# Copied at once: four loads, then four stores.
BLOCK = 4 * LINE
# Distance of the prefetches ahead of the copy, in bytes.
AHEAD = 4096

_ARRAY = numba.types.int64[::1]
SIGNATURE = numba.types.boolean(
    numba.types.UniTuple(_ARRAY, 2),
    numba.types.UniTuple(_ARRAY, 5),
    numba.types.UniTuple(numba.types.int64, 4),
    numba.types.boolean,
)

_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LINE // 8)
_BYTES = ir.IntType(8).as_pointer()


# ---------------------------------------------------------------- single instructions

Emit = Callable[[Any, Any, Any, Any], Any]


def _intrinsic(function: Callable[..., tuple[Any, Emit]]) -> Any:
    """Return a function that compiles to the instructions that ``emit`` writes."""
    return extending.intrinsic(function)


def _inlined(function: Callable[..., None]) -> Any:
    """Return a function that is inlined into its callers."""
    return numba.njit(forceinline=True)(function)


def _function(function: Callable[..., Any]) -> Any:
    """Return a compiled function."""
    return numba.njit(function)


@_intrinsic
def _memcpy(typing_context: Any, to: Any, from_: Any, length: Any) -> tuple[Any, Emit]:
    """Call memcpy of the C library, for less than a line."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, from_, length = args
        to, from_ = (builder.inttoptr(address, _BYTES) for address in (to, from_))
        cgutils.raw_memcpy(builder, to, from_, length, 1)
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64, numba.types.int64, numba.types.int64), emit


def _line_copy(num_lines: int, *, past_cache: bool) -> Any:
    """Return a copy of ``num_lines`` lines. Past the cache, ``to`` must be aligned to a line."""

    @_intrinsic
    def move(typing_context: Any, to: Any, from_: Any) -> tuple[Any, Emit]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def line(address: Any, index: int) -> Any:
                at = builder.add(address, _WORD(index * LINE))
                return builder.inttoptr(at, _VECTOR.as_pointer())

            to, from_ = args
            lines = [builder.load(line(from_, i), align=1) for i in range(num_lines)]
            for i, value in enumerate(lines):
                store = builder.store(value, line(to, i), align=LINE if past_cache else 1)
                if past_cache:
                    one = builder.module.add_metadata([ir.IntType(32)(1)])
                    store.set_metadata("nontemporal", one)
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64, numba.types.int64), emit

    return move


def _prefetcher(num_lines: int, *, to_write: bool) -> Any:
    """Return a prefetch of ``num_lines`` lines into the L2 cache, which spares the L1 cache."""

    @_intrinsic
    def prefetch(typing_context: Any, address: Any) -> tuple[Any, Emit]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [_BYTES, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
            for index in range(num_lines):
                pointer = builder.inttoptr(builder.add(args[0], _WORD(index * LINE)), _BYTES)
                builder.call(function, [pointer, number(int(to_write)), number(2), number(1)])
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64), emit

    return prefetch


@_intrinsic
def _scratch(typing_context: Any) -> tuple[Any, Emit]:
    """Return the address of two lines on the stack."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2 * LINE // 8))
        return builder.ptrtoint(memory, _WORD)

    return numba.types.int64(), emit


@_intrinsic
def _fence(typing_context: Any) -> tuple[Any, Emit]:
    """Complete all stores past the cache before the copy is reported as done."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), emit


def _element_copy(num_bytes: int) -> Any:
    """Return a copy of one element through a register."""

    @_intrinsic
    def move(typing_context: Any, to: Any, from_: Any) -> tuple[Any, Emit]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = ir.IntType(8 * num_bytes).as_pointer()
            to, from_ = (builder.inttoptr(address, pointer) for address in args)
            builder.store(builder.load(from_, align=1), to, align=1)
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64, numba.types.int64), emit

    return move


_store_line, _store_block = (_line_copy(n, past_cache=True) for n in (1, BLOCK // LINE))
_move_line = _line_copy(1, past_cache=False)
_read_line, _read_block = (_prefetcher(n, to_write=False) for n in (1, BLOCK // LINE))
_write_line = _prefetcher(1, to_write=True)


# ---------------------------------------------------------------- one piece
#
# Ways to copy ``length`` bytes, with one signature. ``soon_to`` and ``soon_from`` are where the
# copy will be after about AHEAD more bytes.


@_inlined
def _even_past(to: int, from_: int, length: int, soon_to: int, soon_from: int) -> None:
    for at in range(0, length, BLOCK):
        _read_block(soon_from + at)
        _store_block(to + at, from_ + at)


@_inlined
def _odd_past(to: int, from_: int, length: int, soon_to: int, soon_from: int) -> None:
    at = min(-to & (LINE - 1), length)
    if at:
        _write_line(soon_to)
        _memcpy(to, from_, at)
    while at + LINE <= length:
        _read_line(soon_from + at)
        _store_line(to + at, from_ + at)
        at += LINE
    if at < length:
        _write_line(soon_to + length)
        _memcpy(to + at, from_ + at, length - at)


@_inlined
def _through(to: int, from_: int, length: int, soon_to: int, soon_from: int) -> None:
    at = 0
    while at + LINE <= length:
        _read_line(soon_from + at)
        _write_line(soon_to + at)
        _move_line(to + at, from_ + at)
        at += LINE
    if at < length:
        _memcpy(to + at, from_ + at, length - at)


# ---------------------------------------------------------------- a grid of pieces


def _grid_of(copy: Any) -> Any:
    """Return the loop over ``rows × cols`` pieces with one way to copy compiled into it."""

    @_function
    def grid(at: Any, soon: Any, shape: Any, strides: Any) -> None:
        to, from_ = at
        soon_to, soon_from, next_to, next_from, ahead = soon
        length, rows, cols = shape
        source_row, target_row, source_col, target_col = strides
        for row in range(rows):
            if row == rows - ahead:
                soon_to, soon_from = next_to, next_from
            for col in range(cols):
                here_to, here_from = to + col * target_col, from_ + col * source_col
                done = 0
                while length - done > AHEAD:
                    more = done + AHEAD
                    copy(here_to + done, here_from + done, AHEAD, here_to + more, here_from + more)
                    done = more
                copy(
                    here_to + done,
                    here_from + done,
                    length - done,
                    soon_to + col * target_col,
                    soon_from + col * source_col,
                )
            to, from_ = to + target_row, from_ + source_row
            soon_to, soon_from = soon_to + target_row, soon_from + source_row

    return grid


@_function
def _grid_dense_past(at: Any, soon: Any, shape: Any, strides: Any) -> None:
    """Copy one column of odd pieces that are contiguous in the target.

    A line that two pieces share is assembled first, so that it is stored as a whole and never
    fetched.
    """
    to, from_ = at
    _, soon_from, _, next_from, ahead = soon
    length, rows, _ = shape
    scratch = _scratch()
    done = min(-to & (LINE - 1), length) if rows else 0
    _memcpy(to, from_, done)
    for row in range(rows):
        if row == rows - ahead:
            soon_from = next_from
        while done + LINE <= length:
            _read_line(soon_from + done)
            _store_line(to + done, from_ + done)
            done += LINE
        rest, done = length - done, 0
        if rest and row + 1 < rows:
            _move_line(scratch, from_ + length - LINE)
            _move_line(scratch + LINE, from_ + strides[0])
            _store_line(to + length - rest, scratch + LINE - rest)
            done = LINE - rest
        elif rest:
            _memcpy(to + length - rest, from_ + length - rest, rest)
        to, from_, soon_from = to + length, from_ + strides[0], soon_from + strides[0]


def _element_grid(num_bytes: int) -> Any:
    """Return the loop over a grid of elements, with the shorter steps in the target inside."""
    move = _element_copy(num_bytes)

    @_function
    def grid(to: int, from_: int, rows: int, cols: int, strides: Any) -> None:
        source_row, target_row, source_col, target_col = strides
        if abs(target_row) < abs(target_col):
            rows, cols = cols, rows
            source_row, source_col = source_col, source_row
            target_row, target_col = target_col, target_row
        for row in range(rows):
            here_to, here_from = to + row * target_row, from_ + row * source_row
            for col in range(cols):
                move(here_to + col * target_col, here_from + col * source_col)

    return grid


_grid_of_1, _grid_of_2, _grid_of_4, _grid_of_8 = (_element_grid(n) for n in (1, 2, 4, 8))


@_function
def _grid_elements(to: int, from_: int, shape: Any, strides: Any) -> bool:
    """Copy a grid of elements. Return False if the pieces are no elements."""
    length, rows, cols = shape
    if length == 4:
        _grid_of_4(to, from_, rows, cols, strides)
    elif length == 2:
        _grid_of_2(to, from_, rows, cols, strides)
    elif length == 1:
        _grid_of_1(to, from_, rows, cols, strides)
    elif length == 8:
        _grid_of_8(to, from_, rows, cols, strides)
    else:
        return False
    return True


_grid_even_past, _grid_odd_past = _grid_of(_even_past), _grid_of(_odd_past)
_grid_through = _grid_of(_through)


# ---------------------------------------------------------------- a part


@_function
def _lookahead(lengths: Any, rows: Any, cols: Any) -> tuple[int, int]:
    """Return the distance of prefetches in segments and rows, or -1 if a number is invalid."""
    row_bytes = num_rows = 1
    for segment in range(len(lengths)):
        if lengths[segment] < 0 or rows[segment] < 0 or cols[segment] < 0:
            return -1, -1
        row_bytes = max(row_bytes, lengths[segment] * cols[segment])
        num_rows = max(num_rows, rows[segment])
    ahead = max(1, AHEAD // row_bytes)
    return (0, ahead) if ahead < num_rows else (-(-ahead // num_rows), 0)


@_function
def _place(layer: int, segment: int, num_layers: int, num_segments: int) -> tuple[int, int]:
    """Return the layer and segment of a prefetch that may reach into the next layer."""
    if segment < num_segments:
        return layer, segment
    return min(layer + 1, num_layers - 1), min(segment - num_segments, num_segments - 1)


def copy_part(bases: Any, segments: Any, strides: Any, keep: bool) -> bool:
    """Copy the same pieces in each layer. Return False, and copy nothing, if a count is negative.

    ``copy.cpu`` compiles this function. ``Pieces`` describes the arrays.
    """
    source_bases, target_bases = bases
    sources, targets, lengths, rows, cols = segments
    source_row, target_row, _, target_col = strides
    segments_ahead, rows_ahead = _lookahead(lengths, rows, cols)
    if rows_ahead < 0:
        return False
    num_layers, num_segments = len(source_bases), len(lengths)
    for layer in range(num_layers):
        for segment in range(num_segments):
            from_ = source_bases[layer] + sources[segment]
            to = target_bases[layer] + targets[segment]
            there = _place(layer, segment + segments_ahead, num_layers, num_segments)
            beyond = _place(there[0], there[1] + 1, num_layers, num_segments)
            soon = (
                target_bases[there[0]] + targets[there[1]] + rows_ahead * target_row,
                source_bases[there[0]] + sources[there[1]] + rows_ahead * source_row,
                target_bases[beyond[0]] + targets[beyond[1]],
                source_bases[beyond[0]] + sources[beyond[1]],
                rows_ahead,
            )
            shape = (lengths[segment], rows[segment], cols[segment])
            even = shape[0] % BLOCK == 0 and (to | target_row | target_col) % LINE == 0
            if shape[0] <= 8 and _grid_elements(to, from_, shape, strides):
                continue
            if keep:
                _grid_through((to, from_), soon, shape, strides)
            elif even:
                _grid_even_past((to, from_), soon, shape, strides)
            elif shape[2] == 1 and target_row == shape[0] and LINE <= shape[0] <= AHEAD:
                _grid_dense_past((to, from_), soon, shape, strides)
            else:
                _grid_odd_past((to, from_), soon, shape, strides)
    _fence()
    return True


# ---------------------------------------------------------------- compiling


def compiled(*, cache: bool) -> Any:
    """Return ``copy_part`` as machine code, from the disk cache if it is there."""
    return numba.njit(SIGNATURE, nogil=True, cache=cache)(copy_part)


def platform() -> tuple[Any, ...]:
    """Return what the machine code depends on besides this file."""
    return (
        numba.__version__,
        llvmlite.__version__,
        *registry.cpu_target.target_context.codegen().magic_tuple(),
    )
