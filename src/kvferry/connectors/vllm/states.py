"""Recurrent state in vLLM's blocks: a ``MambaSpec`` as kvferry groups.

The state of a request is in one block of its cache group. The kinds of state of a layer
(convolution, recurrent) are adjacent in the block, which vLLM registers as bytes.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from kvferry import DType, Group, InputError, Span, touched_pages
from kvferry.connectors.states import StateForm, StatePart, groups_of, parts_of

# vLLM's layer types, and the channels that their convolution concatenates; None without one.
JOINED: dict[str, str | None] = {
    "MAMBA1": "x",
    "MAMBA2": "x, B, C",
    "GDN_ATTN": "q, k, v",
    "SHORT_CONV": "x",
    "LINEAR": None,
}
NUM_KINDS = {"SHORT_CONV": 1, "LINEAR": 1}


class StateSpec(NamedTuple):
    """Relevant fields of a ``MambaSpec``: the shape of each kind of state on one rank.

    ``is_everywhere``: the state is replicated on every rank.
    """

    layer_type: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    block_tokens: int
    is_everywhere: bool = False

    def block_at(self, num_tokens: int) -> int:
        """Return the index of the block with the state after ``num_tokens`` tokens."""
        return touched_pages(Span(0, num_tokens), self.block_tokens).end - 1


class StateSharding(NamedTuple):
    """Sharding of an engine's state.

    ``channels_first``: the order of axes in a convolution's state. ``bc_groups``: number of B and C
    groups of a Mamba-2 layer; None if the model's configuration does not contain it.
    """

    tp: int
    channels_first: bool = False
    bc_groups: int | None = None


class PlacedState(NamedTuple):
    """Groups of one kind of state, and their positions in a block."""

    groups: tuple[Group, ...]
    parts: tuple[StatePart, ...]


def place_states(
    name: str, layers: list[int], spec: StateSpec, sharding: StateSharding
) -> list[PlacedState]:
    """Return the groups of some layers' state. Raises ``InputError`` if it is not supported."""
    placed, first_byte = [], 0
    for (kind, form), dtype in zip(_forms(spec, sharding), spec.dtypes, strict=True):
        # A row is transferred as bytes, so the group's name includes the dtype.
        own = f"{name} {kind} {dtype}"
        parts = [
            StatePart(p.group, p.tensor, first_byte + p.first_byte, p.num_units, p.unit_bytes)
            for p in parts_of(own, form, sharding.tp)
        ]
        groups = groups_of(own, form, layers, sharding.tp)
        placed.append(PlacedState(tuple(groups), tuple(parts)))
        first_byte += form.row_bytes
    return placed


def _forms(spec: StateSpec, sharding: StateSharding) -> list[tuple[str, StateForm]]:
    """Return the kinds of state, in the order of the block."""
    if spec.layer_type not in JOINED:
        known = ", ".join(JOINED)
        raise InputError(
            f"recurrent state of the type {spec.layer_type!r:.100} is not supported yet, only "
            f"{known}; serve this model without kvferry"
        )
    if len(spec.shapes) != NUM_KINDS.get(spec.layer_type, 2):
        raise InputError(
            f"vLLM keeps {len(spec.shapes)} kinds of state for each {spec.layer_type} layer, which "
            f"is not supported; leave out --use-replayssm"
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
    """Return the form of a recurrent state, whose first axis is sharded."""
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
    """Return this rank's lengths of a convolution's axes, and the indexes of replicated ones."""
    if spec.layer_type in ("MAMBA1", "SHORT_CONV"):
        return (dim,), frozenset()
    heads, head_dim, state = spec.shapes[1]
    inner = heads * head_dim
    other, rest = divmod(dim - inner, 2)  # B and C, or q and k
    if rest or other < 1:
        raise InputError(
            f"a convolution of {dim} channels beside {heads} heads of {head_dim} does not join "
            f"{JOINED[spec.layer_type]}; this model's state is not supported"
        )
    if spec.layer_type == "GDN_ATTN":
        return (other, other, inner), frozenset()
    one_group = _num_bc_groups(other, state, sharding) == 1
    return (inner, other, other), frozenset({1, 2} if one_group else ())


def _num_bc_groups(length: int, state: int, sharding: StateSharding) -> int:
    """Return the number of B and C groups over all ranks. A single group is replicated."""
    if sharding.bc_groups is not None:
        return sharding.bc_groups
    here = length // state
    if here == 1 and sharding.tp > 1:
        raise InputError(
            "this model's configuration does not say how many groups share B and C (n_groups), so "
            "its state can't be resharded; serve it with --tensor-parallel-size 1"
        )
    return here * sharding.tp
