"""The compiled loop of ``checksum.cpu``: adds the values of entries in several layers.

numba compiles it. A line of content is hashed in vectors of 32-bit halves, whose products have 64
bits: memory is read about as fast as by a copy. docs/protocol.md defines the value of a chunk.
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
numpy: Any = importlib.import_module("numpy")

CHUNK_BYTES = 4096
CHUNK_BITS, UNIT_BITS = 15, 16

_INT64S = numba.types.int64[::1]
_UINT64S = numba.types.uint64[::1]
SIGNATURE = numba.types.void(
    _UINT64S,
    numba.types.Tuple((_INT64S, _UINT64S)),
    numba.types.UniTuple(_INT64S, 2),
    numba.types.UniTuple(numba.types.int64, 4),
    numba.types.UniTuple(numba.types.int64, 2),
    _UINT64S,
)

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
LINE = 64
_WORDS = ir.VectorType(_WORD, LINE // 8)
_HALVES = ir.VectorType(ir.IntType(32), LINE // 4)
Emit = Callable[[Any, Any, Any, Any], Any]


def _intrinsic(function: Callable[..., tuple[Any, Emit]]) -> Any:
    """Return a function that compiles to the instructions that ``emit`` writes."""
    return extending.intrinsic(function)


def _inlined(function: Callable[..., Any]) -> Any:
    """Return a function that is inlined into its callers."""
    return numba.njit(forceinline=True)(function)


# ---------------------------------------------------------------- instructions


@_intrinsic
def _load_byte(typing_context: Any, address: Any) -> tuple[Any, Emit]:
    """Load one byte."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[0], _BYTE.as_pointer()), align=1)
        return builder.zext(value, _WORD)

    return numba.types.uint64(numba.types.int64), emit


@_intrinsic
def _hash_lines(
    typing_context: Any, address: Any, low_keys: Any, high_keys: Any, num_lines: Any
) -> tuple[Any, Emit]:
    """Return both sums of products over some lines. ``low_keys``, ``high_keys`` are addresses."""
    pair = numba.types.UniTuple(numba.types.uint64, 2)
    int64 = numba.types.int64

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, *keys, num_lines = args
        zero = ir.Constant(_WORDS, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in keys]

        def halves(base: Any, offset: Any) -> Any:
            pointer = builder.inttoptr(builder.add(base, offset), _HALVES.as_pointer())
            return builder.load(pointer, align=1)

        with cgutils.for_range(builder, num_lines) as loop:
            offset = builder.mul(loop.index, _WORD(LINE))
            content = halves(address, offset)
            for key, total in zip(keys, sums, strict=True):
                words = builder.bitcast(builder.add(content, halves(key, offset)), _WORDS)
                low = builder.and_(words, ir.Constant(_WORDS, [0xFFFFFFFF] * (LINE // 8)))
                high = builder.lshr(words, ir.Constant(_WORDS, [32] * (LINE // 8)))
                builder.store(builder.add(builder.load(total), builder.mul(low, high)), total)
        results = [_sum_of(builder, builder.load(total)) for total in sums]
        return context.make_tuple(builder, pair, results)

    return pair(int64, int64, int64, int64), emit


def _sum_of(builder: Any, vector: Any) -> Any:
    """Emit the sum of a vector's words."""
    words = [builder.extract_element(vector, ir.IntType(32)(i)) for i in range(LINE // 8)]
    total = words[0]
    for word in words[1:]:
        total = builder.add(total, word)
    return total


# ---------------------------------------------------------------- values


@_inlined
def _mix(word: Any) -> Any:
    word = (word ^ (word >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return word ^ (word >> numpy.uint64(31))


@_inlined
def _product(word: Any, key: Any) -> Any:
    """Return the product of both halves of a word, each added to that of the key."""
    half = numpy.uint64(0xFFFFFFFF)
    by = numpy.uint64(32)
    return ((word + key) & half) * (((word >> by) + (key >> by)) & half)


@_inlined
def _chunk_value(address: int, num_bytes: int, keys: Any, place_key: Any) -> Any:
    at = num_bytes - num_bytes % LINE
    low_keys = keys.ctypes.data
    low, high = _hash_lines(address, low_keys, low_keys + CHUNK_BYTES, at // LINE)
    while at < num_bytes:
        word = numpy.uint64(0)
        for index in range(min(8, num_bytes - at)):
            word |= _load_byte(address + at + index) << numpy.uint64(8 * index)
        low += _product(word, keys[at >> 3])
        high += _product(word, keys[(CHUNK_BYTES + at) >> 3])
        at += 8
    return _mix(_mix(low + place_key) + high)


@_inlined
def _entry_value(address: int, unit_bytes: int, keys: Any, label: Any, place: int) -> Any:
    label += numpy.uint64(place << CHUNK_BITS)
    if unit_bytes <= CHUNK_BYTES:
        return _chunk_value(address, unit_bytes, keys, _mix(label))
    total = numpy.uint64(0)
    for first in range(0, unit_bytes, CHUNK_BYTES):
        num_bytes = min(CHUNK_BYTES, unit_bytes - first)
        total += _chunk_value(address + first, num_bytes, keys, _mix(label))
        label += numpy.uint64(1)
    return total


@_inlined
def _contiguous(address: int, elements: Any, copy: Any) -> Any:
    """Return the address of a unit's elements one after another, in ``copy`` if they are apart."""
    element_bytes, element_stride = elements
    if element_stride == element_bytes:
        return address
    for at in range(len(copy)):
        element, byte = at // element_bytes, at % element_bytes
        copy[at] = _load_byte(address + element * element_stride + byte)
    return copy.ctypes.data


def add_entries(keys: Any, layers: Any, tokens: Any, units: Any, elements: Any, sums: Any) -> None:
    """Add the values of a layer's entries to its sum, in every layer.

    ``layers``: the address and the label of each. ``tokens``: the offset of each token's first
    unit, and its position. ``units``: number, first of the model, stride and bytes of a unit.
    ``elements``: bytes and stride of an element.
    """
    addresses, labels = layers
    offsets, positions = tokens
    num_units, first_unit, unit_stride, unit_bytes = units
    num_tokens = len(offsets)
    copy = numpy.empty(unit_bytes if elements[0] != elements[1] else 0, numpy.uint8)
    # Walk through memory in its order, whether units or tokens are next to each other.
    by_unit = num_tokens > 1 and abs(offsets[1] - offsets[0]) < unit_stride
    for layer in range(len(addresses)):
        label, base, total = labels[layer], addresses[layer], numpy.uint64(0)
        if by_unit:
            for unit in range(num_units):
                for token in range(num_tokens):
                    first = base + offsets[token] + unit * unit_stride
                    address = _contiguous(first, elements, copy)
                    place = positions[token] << UNIT_BITS | first_unit + unit
                    total += _entry_value(address, unit_bytes, keys, label, place)
        else:
            for token in range(num_tokens):
                for unit in range(num_units):
                    first = base + offsets[token] + unit * unit_stride
                    address = _contiguous(first, elements, copy)
                    place = positions[token] << UNIT_BITS | first_unit + unit
                    total += _entry_value(address, unit_bytes, keys, label, place)
        sums[layer] += total


def compiled(*, cache: bool) -> Any:
    """Return ``add_entries`` as machine code, from the disk cache if it is there."""
    return numba.njit(SIGNATURE, nogil=True, cache=cache)(add_entries)


def platform() -> tuple[Any, ...]:
    """Return what the machine code depends on besides this file."""
    return (
        numba.__version__,
        llvmlite.__version__,
        *registry.cpu_target.target_context.codegen().magic_tuple(),
    )
