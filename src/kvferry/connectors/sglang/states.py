"""State rows of SGLang's linear-attention layers: a buffer per layer and kind of state. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import Base, Group, InputError, Placement
from kvferry.connectors.states import StateForm, groups_of, parts_of


@dataclass(frozen=True, kw_only=True)
class StateBuffer(StateForm):
    """Consecutive rows of one layer and one kind of state."""

    address: int
    length: int
    layer: int


def split_kinds(buffers: Sequence[StateBuffer]) -> list[list[StateBuffer]]:
    """Split the buffers by kind; SGLang lists all layers of one kind before the next kind."""
    kinds: list[list[StateBuffer]] = []
    for buffer in buffers:
        if not kinds or buffer.layer in {known.layer for known in kinds[-1]}:
            kinds.append([])
        kinds[-1].append(buffer)
    return kinds


def state_groups(
    buffers: Sequence[StateBuffer], tp: int, layers: Sequence[int] = ()
) -> list[Group]:
    """Return the layout's groups of state, over all ranks.

    ``layers`` are those of all pipeline stages; without them the buffers' own are all.
    """
    return [
        group
        for name, kind in _named_kinds(buffers)
        for group in groups_of(
            name, _common_form(kind), layers or [buffer.layer for buffer in kind], tp
        )
    ]


def state_placements(buffers: Sequence[StateBuffer], tp: int, first_region: int) -> list[Placement]:
    """Return the placements on this rank; regions are numbered from ``first_region``."""
    regions = {buffer.address: first_region + place for place, buffer in enumerate(buffers)}
    placements = []
    for name, kind in _named_kinds(buffers):
        form = _common_form(kind)
        num_rows = min(buffer.length for buffer in kind) // form.row_bytes
        for part in parts_of(name, form, tp):
            bases = tuple(
                Base(buffer.layer, regions[buffer.address], part.first_byte)
                for buffer in sorted(kind, key=lambda each: each.layer)
            )
            placements.append(
                Placement(
                    *(part.group, part.tensor, form.row_bytes, 0, part.unit_bytes, num_rows, bases)
                )
            )
    return placements


def _named_kinds(buffers: Sequence[StateBuffer]) -> Iterator[tuple[str, list[StateBuffer]]]:
    for number, kind in enumerate(split_kinds(buffers)):
        yield f"state{number}", kind


def _common_form(kind: Sequence[StateBuffer]) -> StateBuffer:
    first = kind[0]
    for buffer in kind:
        if (buffer.row_bytes, buffer.dim, buffer.outer, buffer.blocks) != (
            *(first.row_bytes, first.dim, first.outer, first.blocks),
        ):
            raise InputError(
                f"the state rows of layers {first.layer} and {buffer.layer} differ in shape; this "
                f"model's state is not supported"
            )
    return first


def row_of(indices: Sequence[Any] | None) -> int | None:
    """Return a request's state row; None without one."""
    if not indices:
        return None
    return int(np.asarray(indices[0]).reshape(-1)[0])
