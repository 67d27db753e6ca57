"""State rows in kvferry's words: what recurrent layers keep of a request, as slot groups.

An engine keeps a row a request for each kind of state of a layer (convolution, recurrent). Inside a
row one axis is dealt out over the ranks: heads, or channels. It may be several axes joined (a
convolution's query, key and value channels), each dealt out by itself or whole on every rank, and
there may be rows of it inside the row. Each joined axis is a group of its own whose units are the
axis' entries; what every rank has whole is a group of one unit.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import DType, Group, InputError, StateRow, Tensor


@dataclass(frozen=True, kw_only=True)
class StateForm:
    """One kind of state: a request's row of it, as one rank has it.

    ``dim`` is the length of the axis that is dealt out, here, or 0 if none is; ``outer`` how many
    rows of it a request's row has; ``blocks`` the lengths over all ranks of the axes that it joins,
    and ``whole`` the places of those that every rank has whole.
    """

    row_bytes: int
    dim: int
    outer: int = 1
    blocks: tuple[int, ...] = ()
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StatePart:
    """Where a tensor of a group lies in a row, and how many of its units this rank has."""

    group: str
    tensor: str
    first_byte: int
    num_units: int
    unit_bytes: int


def groups_of(name: str, form: StateForm, layers: Sequence[int], tp: int) -> list[Group]:
    """What layers keep in such rows, over all ranks."""
    entry = _entry_bytes(form)
    return [
        Group(
            axis.name,
            StateRow(),
            tuple(sorted(layers)),
            axis.units,
            tuple(
                Tensor(_row_name(row), DType.UINT8, axis.each * entry) for row in range(form.outer)
            ),
        )
        for axis in _axes(name, form, tp)
    ]


def parts_of(name: str, form: StateForm, tp: int) -> list[StatePart]:
    """Where those groups' tensors lie in a row of one rank."""
    entry = _entry_bytes(form)
    return [
        StatePart(
            axis.name,
            _row_name(row),
            (row * max(form.dim, 1) + axis.first) * entry,
            axis.length // axis.each,
            axis.each * entry,
        )
        for axis in _axes(name, form, tp)
        for row in range(form.outer)
    ]


@dataclass(frozen=True)
class _Axis:
    """One axis: where it begins in a row of ``dim``, how long it is here, its units over all ranks.

    ``each`` is how many entries a unit has.
    """

    name: str
    first: int
    length: int
    units: int
    each: int = 1


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
    found = []
    for place, (block, length) in enumerate(zip(blocks, here, strict=True)):
        own = name if len(blocks) == 1 else f"{name}.{place}"
        units, each = (1, block) if place in form.whole else (block, 1)
        found.append(_Axis(own, sum(here[:place]), length, units, each))
    return found
