"""The state rows of SGLang's linear-attention layers: one buffer a layer for each kind of state.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import Base, Group, InputError, Placement
from kvferry.connectors.states import StateForm, groups_of, parts_of


@dataclass(frozen=True, kw_only=True)
class StateBuffer(StateForm):
    """One layer of one kind of state: rows of that form, one behind the other."""

    address: int
    length: int
    layer: int


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
    return [
        group
        for name, kind in _named(buffers)
        for group in groups_of(name, _alike(kind), [buffer.layer for buffer in kind], tp)
    ]


def state_placements(buffers: Sequence[StateBuffer], tp: int, first_region: int) -> list[Placement]:
    """Where it lies on this rank; each buffer is a region, from the given one on."""
    regions = {buffer.address: first_region + place for place, buffer in enumerate(buffers)}
    placements = []
    for name, kind in _named(buffers):
        form = _alike(kind)
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


def _named(buffers: Sequence[StateBuffer]) -> Iterator[tuple[str, list[StateBuffer]]]:
    for number, kind in enumerate(kinds_of(buffers)):
        yield f"state{number}", kind


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


def row_of(indices: Sequence[Any] | None) -> int | None:
    """A request's state row, as SGLang names it; None where there is none."""
    if not indices:
        return None
    return int(np.asarray(indices[0]).reshape(-1)[0])
