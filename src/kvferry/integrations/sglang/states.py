"""The state rows of SGLang's linear-attention layers, in kvferry's words: slot groups.

SGLang keeps one buffer a layer for each kind of state (convolution, recurrent), a row a request.
Inside a row one axis is dealt out over the ranks: heads, or channels. It may be several axes joined
(a convolution's query, key and value channels), each dealt out by itself, and there may be rows of
it inside the row. Each joined axis is a group of its own whose units are the axis' entries; what
every rank has alike is a group of one unit.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import Base, DType, Group, InputError, Placement, Slot, Tensor


@dataclass(frozen=True, kw_only=True)
class StateBuffer:
    """One layer of one kind of state, as one rank has it.

    ``dim`` is the length of the axis that is dealt out, here, or 0 if none is; ``outer`` how many
    rows of it a request's row has; ``blocks`` the whole lengths of the axes that it joins.
    """

    address: int
    length: int
    row_bytes: int
    layer: int
    dim: int
    outer: int = 1
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Axis:
    """One axis that is dealt out: where it begins in a row of ``dim``, and its whole length."""

    name: str
    first: int
    units: int


def kinds_of(buffers: Sequence[StateBuffer]) -> list[list[StateBuffer]]:
    """The buffers by kind: SGLang lists the layers of one kind, then those of the next."""
    kinds: list[list[StateBuffer]] = []
    for buffer in buffers:
        if not kinds or buffer.layer in {known.layer for known in kinds[-1]}:
            kinds.append([])
        kinds[-1].append(buffer)
    return kinds


def state_groups(buffers: Sequence[StateBuffer], tp: int) -> list[Group]:
    """What the model keeps beside K and V, over all ranks."""
    groups = []
    for number, kind in enumerate(kinds_of(buffers)):
        first = _alike(kind)
        tensors = tuple(
            Tensor(f"row{row}", DType.UINT8, _unit_bytes(first)) for row in range(first.outer)
        )
        layers = tuple(sorted(buffer.layer for buffer in kind))
        for axis in _axes(number, first, tp):
            groups.append(Group(axis.name, Slot(), layers, axis.units, tensors))
    return groups


def state_placements(buffers: Sequence[StateBuffer], tp: int, first_region: int) -> list[Placement]:
    """Where it lies on this rank; each buffer is a region, from the given one on."""
    regions = {buffer.address: first_region + place for place, buffer in enumerate(buffers)}
    placements = []
    for number, kind in enumerate(kinds_of(buffers)):
        first = _alike(kind)
        unit = _unit_bytes(first)
        for axis in _axes(number, first, tp):
            for row in range(first.outer):
                offset = (row * max(first.dim, 1) + axis.first) * unit
                bases = tuple(
                    Base(buffer.layer, regions[buffer.address], offset)
                    for buffer in sorted(kind, key=lambda each: each.layer)
                )
                num_rows = min(buffer.length for buffer in kind) // first.row_bytes
                placements.append(
                    Placement(axis.name, f"row{row}", first.row_bytes, 0, unit, num_rows, bases)
                )
    return placements


def _alike(kind: Sequence[StateBuffer]) -> StateBuffer:
    first = kind[0]
    for buffer in kind:
        if (buffer.row_bytes, buffer.dim, buffer.outer, buffer.blocks) != (
            *(first.row_bytes, first.dim, first.outer, first.blocks),
        ):
            raise InputError(
                f"state of layer {buffer.layer} has another form than that of layer "
                f"{first.layer}; this model's state is not supported"
            )
    return first


def _unit_bytes(buffer: StateBuffer) -> int:
    entries = buffer.outer * max(buffer.dim, 1)
    unit, rest = divmod(buffer.row_bytes, entries)
    if rest:
        raise InputError(
            f"a state row of {buffer.row_bytes} bytes does not hold {entries} equal entries; "
            f"this model's state is not supported"
        )
    return unit


def _axes(number: int, buffer: StateBuffer, tp: int) -> list[_Axis]:
    if buffer.dim == 0:
        return [_Axis(f"state{number}", 0, 1)]
    blocks = buffer.blocks or (buffer.dim * tp,)
    if sum(blocks) != buffer.dim * tp or any(block % tp for block in blocks):
        raise InputError(
            f"{tp} ranks with {buffer.dim} entries of state each do not make up axes of "
            f"{', '.join(map(str, blocks))}; this model's state is not supported"
        )
    firsts = [sum(blocks[:place]) // tp for place in range(len(blocks))]
    names = [
        f"state{number}" if len(blocks) == 1 else f"state{number}.{p}" for p in range(len(blocks))
    ]
    return [_Axis(*axis) for axis in zip(names, firsts, blocks, strict=True)]


def row_of(indices: Sequence[Any] | None) -> int | None:
    """A request's state row, as SGLang names it; None where there is none."""
    if not indices:
        return None
    return int(np.asarray(indices[0]).reshape(-1)[0])
