"""How the two sides of a plan keep the entries of each tensor, and so what a copy has to do.

A layout may pack the tensors of a group into one row, and may keep a tensor transposed. If both
sides do the same, the copy keeps it: packed tensors are copied as one, and a staging slot has
transposed tensors transposed. If only one side does, a slot has plain rows of one tensor.
"""

from __future__ import annotations

from functools import cached_property

from msgspec.structs import replace

from kvferry.layout.layout import Layout
from kvferry.layout.spec import DType, Group, Tensor


class EntryForms:
    """The forms of entries on both sides of a plan."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self._source = source
        self._target = target

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups as copies see them: tensors that both sides pack are one tensor.

        It has the name of the first of them.
        """
        packed = {*self._source.packed} & {*self._target.packed}
        return {
            group.name: _joined(group) if group.name in packed else group
            for group in self._source.spec.groups
        }

    @cached_property
    def translated(self) -> tuple[str, ...]:
        """The tensors, as ``group.tensor``, that only one side has transposed.

        Copies of them go element by element.
        """
        return tuple(sorted({*self._source.transposed} ^ {*self._target.transposed}))

    def transposed_in(self, group: Group) -> tuple[str, ...]:
        """Return the tensors of a group that both sides have transposed."""
        both = {*self._source.transposed} & {*self._target.transposed}
        return tuple(t.name for t in group.tensors if f"{group.name}.{t.name}" in both)


def _joined(group: Group) -> Group:
    """Return a group with one tensor in place of all."""
    tensor = Tensor(group.tensors[0].name, DType.UINT8, group.unit_bytes)
    return replace(group, tensors=(tensor,))
