"""Recurrent state in vLLM's blocks: a ``MambaSpec`` as state rows. Pure: shapes, no tensors.

A request's state after so many tokens lies in one block of its group. A layer's kinds of state
(convolution, recurrent) lie there one behind the other; vLLM registers the whole as bytes.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from kvferry import DType, Group, InputError, Span, touched_pages
from kvferry.connectors.states import StateForm, StatePart, groups_of, parts_of

# vLLM's names of layers by what their convolution joins; None where there is none.
JOINED: dict[str, str | None] = {
    "MAMBA1": "x",
    "MAMBA2": "x, B, C",
    "GDN_ATTN": "q, k, v",
    "SHORT_CONV": "x",
    "LINEAR": None,
}
NUM_KINDS = {"SHORT_CONV": 1, "LINEAR": 1}


class StateSpec(NamedTuple):
    """What matters of a ``MambaSpec``: each kind's shape on one rank, and what a block stands for.

    ``is_everywhere``: every rank has all of it.
    """

    layer_type: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    block_tokens: int
    is_everywhere: bool = False

    def block_at(self, num_tokens: int) -> int:
        """Which of a request's blocks has the state after so many tokens."""
        return touched_pages(Span(0, num_tokens), self.block_tokens).end - 1


class StateSharding(NamedTuple):
    """How an engine deals state out: ranks, its convolutions' order, how many B and C there are.

    ``bc_groups`` is None where the model's configuration does not say.
    """

    tp: int
    channels_first: bool = False
    bc_groups: int | None = None


class PlacedState(NamedTuple):
    """One kind of state of a group's layers, as it lies in their blocks."""

    groups: tuple[Group, ...]
    parts: tuple[StatePart, ...]


def place_states(
    name: str, layers: list[int], spec: StateSpec, sharding: StateSharding
) -> list[PlacedState]:
    """How such layers' state is carried, or an ``InputError`` that says why it can't be."""
    found, first_byte = [], 0
    for (kind, form), dtype in zip(_forms(spec, sharding), spec.dtypes, strict=True):
        # A row is carried as bytes, so that its name says what they are.
        own = f"{name} {kind} {dtype}"
        parts = [
            StatePart(p.group, p.tensor, first_byte + p.first_byte, p.num_units, p.unit_bytes)
            for p in parts_of(own, form, sharding.tp)
        ]
        groups = groups_of(own, form, layers, sharding.tp)
        found.append(PlacedState(tuple(groups), tuple(parts)))
        first_byte += form.row_bytes
    return found


def _forms(spec: StateSpec, sharding: StateSharding) -> list[tuple[str, StateForm]]:
    """Each kind of state in the order in which they lie in a block."""
    if spec.layer_type not in JOINED:
        known = ", ".join(JOINED)
        raise InputError(
            f"recurrent state of the type {spec.layer_type!r:.100} can't be carried yet, only "
            f"{known}; serve this model whole"
        )
    if len(spec.shapes) != NUM_KINDS.get(spec.layer_type, 2):
        raise InputError(
            f"vLLM keeps {len(spec.shapes)} kinds of state for each {spec.layer_type} layer, which "
            f"can't be carried; leave out --use-replayssm"
        )
    sizes = [
        prod(shape) * DType.parse(dtype).num_bytes
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    if JOINED[spec.layer_type] is None:
        return [("recurrent", _recurrent(spec, sizes[0], spec.shapes[0]))]
    forms = [("convolution", _convolution(spec, sizes[0], sharding))]
    if len(sizes) > 1:
        forms.append(("recurrent", _recurrent(spec, sizes[1], spec.shapes[1])))
    return forms


def _recurrent(spec: StateSpec, row_bytes: int, shape: tuple[int, ...]) -> StateForm:
    """Heads, or channels, come first."""
    return StateForm(row_bytes=row_bytes, dim=0 if spec.is_everywhere else shape[0])


def _convolution(spec: StateSpec, row_bytes: int, sharding: StateSharding) -> StateForm:
    dim, width = spec.shapes[0] if sharding.channels_first else spec.shapes[0][::-1]
    if spec.is_everywhere:
        return StateForm(row_bytes=row_bytes, dim=0)
    joined, whole = _joined(spec, dim, sharding)
    return StateForm(
        row_bytes=row_bytes,
        dim=dim,
        outer=1 if sharding.channels_first else width,
        blocks=tuple(
            length if place in whole else length * sharding.tp
            for place, length in enumerate(joined)
        ),
        whole=whole,
    )


def _joined(
    spec: StateSpec, dim: int, sharding: StateSharding
) -> tuple[tuple[int, ...], frozenset[int]]:
    """This rank's lengths of what a convolution joins, and which of that every rank has whole."""
    if spec.layer_type in ("MAMBA1", "SHORT_CONV"):
        return (dim,), frozenset()
    heads, head_dim, state = spec.shapes[1]
    own = heads * head_dim
    both, rest = divmod(dim - own, 2)
    if rest or both < 1:
        raise InputError(
            f"a convolution of {dim} channels beside {heads} heads of {head_dim} does not join "
            f"{JOINED[spec.layer_type]}; this model's state can't be carried"
        )
    if spec.layer_type == "GDN_ATTN":
        return (both, both, own), frozenset()
    one_group = _num_bc_groups(both, state, sharding) == 1
    return (own, both, both), frozenset({1, 2} if one_group else ())


def _num_bc_groups(length: int, state: int, sharding: StateSharding) -> int:
    """How many groups of heads share B and C. A single one is on every rank."""
    if sharding.bc_groups is not None:
        return sharding.bc_groups
    here = length // state
    if here == 1 and sharding.tp > 1:
        raise InputError(
            "this model's configuration does not say how many groups share B and C (n_groups), so "
            "its state can't be dealt out; serve it with --tensor-parallel-size 1"
        )
    return here * sharding.tp
