"""Recurrent state of an engine's layers as kvferry groups.

For each kind of state of a layer (convolution, recurrent) an engine has one row per request. One
axis of the row, heads or channels, is sharded over the tensor-parallel ranks. It may concatenate
several axes, such as the query, key and value channels of a convolution, of which each is sharded
or replicated by itself. The row may also consist of several inner rows of that axis. Each
concatenated axis becomes a group whose units are the entries of the axis; a replicated axis becomes
a group of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import DType, Group, InputError, StateRow, Tensor


@dataclass(frozen=True, kw_only=True)
class StateForm:
    """Row of one kind of state on one rank.

    ``dim``: length of the sharded axis on this rank; 0 if the whole row is replicated.
    ``outer``: number of inner rows.
    ``blocks``: lengths over all ranks of the concatenated axes; ``whole``: indexes of those that
    are replicated.
    """

    row_bytes: int
    dim: int
    outer: int = 1
    blocks: tuple[int, ...] = ()
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StatePart:
    """Position of a group's tensor in a row, and the number of its units on this rank."""

    group: str
    tensor: str
    first_byte: int
    num_units: int
    unit_bytes: int


def groups_of(name: str, form: StateForm, layers: Sequence[int], tp: int) -> list[Group]:
    """Return the groups of one kind of state, over all ranks."""
    entry = _entry_bytes(form)
    return [
        Group(
            axis.name,
            StateRow(),
            tuple(sorted(layers)),
            axis.units,
            tuple(
                Tensor(_row_name(row), DType.UINT8, axis.unit_entries * entry)
                for row in range(form.outer)
            ),
        )
        for axis in _axes(name, form, tp)
    ]


def parts_of(name: str, form: StateForm, tp: int) -> list[StatePart]:
    """Return the positions of those groups' tensors in a row of one rank."""
    entry = _entry_bytes(form)
    return [
        StatePart(
            axis.name,
            _row_name(row),
            (row * max(form.dim, 1) + axis.first) * entry,
            axis.length // axis.unit_entries,
            axis.unit_entries * entry,
        )
        for axis in _axes(name, form, tp)
        for row in range(form.outer)
    ]


@dataclass(frozen=True)
class _Axis:
    """One of the concatenated axes: its range on this rank, and its units over all ranks."""

    name: str
    first: int
    length: int
    units: int
    unit_entries: int = 1


def _row_name(row: int) -> str:
    return f"row{row}"


def _entry_bytes(form: StateForm) -> int:
    entries = form.outer * max(form.dim, 1)
    entry, rest = divmod(form.row_bytes, entries)
    if rest:
        raise InputError(
            f"a state row of {form.row_bytes} bytes does not hold {entries} equal entries; "
            f"this model's state is not supported"
        )
    return entry


def _axes(name: str, form: StateForm, tp: int) -> list[_Axis]:
    if form.dim == 0:
        return [_Axis(name, 0, 1, 1)]
    blocks = form.blocks or (form.dim * tp,)
    uneven = any(block % tp for place, block in enumerate(blocks) if place not in form.whole)
    here = [block if p in form.whole else block // tp for p, block in enumerate(blocks)]
    if uneven or sum(here) != form.dim:
        raise InputError(
            f"{tp} ranks with {form.dim} entries of state each do not make up axes of "
            f"{', '.join(map(str, blocks))}; this model's state is not supported"
        )
    axes = []
    for place, (block, length) in enumerate(zip(blocks, here, strict=True)):
        axis_name = name if len(blocks) == 1 else f"{name}.{place}"
        units, unit_entries = (1, block) if place in form.whole else (block, 1)
        axes.append(_Axis(axis_name, sum(here[:place]), length, units, unit_entries))
    return axes
