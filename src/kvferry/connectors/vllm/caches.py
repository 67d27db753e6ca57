"""Caches: vLLM's registered tensors as a kvferry layout. Pure: shapes and strides, no tensors.

Since 0.32 every layer's cache is a view ``[blocks, heads, tokens, content]``, whatever the order
in memory; content is a token's K and V of one head, or an MLA latent. It travels as one tensor.
Layers that are cached alike, and have the same blocks, are one group. On a CPU (``paging.py``) a
page and head is one cell. Recurrent state (``states.py``) is registered as a block's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvferry import (
    CacheSpec,
    DType,
    Group,
    InputError,
    Layout,
    Order,
    Paged,
    Parallel,
    Tensor,
    Window,
)
from kvferry.connectors.states import StatePart
from kvferry.connectors.vllm.paging import BlockTables, Paging
from kvferry.connectors.vllm.states import PlacedState, StateSharding, StateSpec, place_states

ONLY_GROUP = "kv"


class CacheView(NamedTuple):
    """What matters of one registered tensor; strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class EngineShape(NamedTuple):
    """What matters of an engine: its sharding, and the whole model's layers and KV heads.

    ``stages`` are the layers of each pipeline stage; with MLA ``num_heads`` is 1. For recurrent
    state: whether a convolution's channels come before its inputs, and how many groups share B, C.
    """

    tp: int
    stages: tuple[int, ...]
    rank: int
    num_heads: int
    block_tokens: int
    on_cpu: bool
    channels_first: bool = False
    bc_groups: int | None = None

    @property
    def state_sharding(self) -> StateSharding:
        """How recurrent state is dealt out."""
        return StateSharding(self.tp, self.channels_first, self.bc_groups)

    @property
    def num_layers(self) -> int:
        """Of the whole model."""
        return sum(self.stages)

    def with_draft(self, last: int) -> EngineShape:
        """A draft model's layers are counted on behind the model's own.

        Without pipeline stages they are layers like all others.
        """
        if len(self.stages) > 1:
            return self
        return self._replace(stages=(max(self.num_layers, last + 1),))

    @property
    def own_layers(self) -> range:
        """The layers of this rank's stage."""
        stage = self.rank // self.tp
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])


class BlockGroup(NamedTuple):
    """One of vLLM's cache groups: layers with the same blocks.

    ``window`` is how many tokens before the next one are kept; None is all of them. With ``state``
    none are, but what was made of them.
    """

    names: frozenset[str]
    window: int | None = None
    state: StateSpec | None = None


class CachePlan(NamedTuple):
    """The layout, how blocks become pages, and which tensor is which layer of which group.

    ``states`` are where in a block's bytes a part of some layers' state lies.
    """

    layout: Layout
    tables: BlockTables
    names: dict[str, dict[int, str]]
    tensor: str
    states: tuple[tuple[StatePart, dict[int, str]], ...] = ()


def plan_caches(
    views: Mapping[str, CacheView], engine: EngineShape, kept: Sequence[BlockGroup] = ()
) -> CachePlan:
    """How these caches are carried, or an ``InputError`` that says why they can't be.

    Without ``kept`` all layers have the same blocks and keep all tokens.
    """
    kept = kept or [BlockGroup(frozenset(views))]
    engine = engine.with_draft(max((layer_of(name)[0] for name in views), default=-1))
    found = _groups(views, engine, kept)
    placed = _states(found, engine, kept)
    found = {name: alike for name, alike in found.items() if kept[alike.place].state is None}
    views = {name: views[name] for alike in found.values() for name in alike.layers.values()}
    if not views:
        raise InputError("vLLM registered no KV cache of attention; this model can't be carried")
    for name, view in views.items():
        _demand_carriable(name, view)
    page_tokens = _the_same({view.shape[2] for view in views.values()}, "blocks of", "tokens")
    paging = Paging(engine.block_tokens, page_tokens, engine.on_cpu)
    order = _order(views)
    tensor = f"blocks_of_{page_tokens}_tokens" if engine.on_cpu else "content"
    groups = tuple(
        _group(name, alike, views[min(alike.layers.items())[1]], engine, (tensor, paging))
        for name, alike in found.items()
    )
    sharding = Parallel(tp=engine.tp, pp=len(engine.stages), stages=engine.stages)
    of_states = [(alike, group) for alike, own in placed for group in own.groups]
    spec = CacheSpec(engine.num_layers, groups + tuple(group for _, group in of_states))
    layout = Layout(spec, sharding, page_tokens=paging.page_cells, order=order)
    tables = BlockTables(
        paging,
        groups,
        {name: alike.place for name, alike in found.items()},
        {group.name: alike.place for alike, group in of_states},
    )
    names = {name: alike.layers for name, alike in found.items()}
    parts = tuple((part, alike.layers) for alike, own in placed for part in own.parts)
    return CachePlan(layout, tables, names, tensor, parts)


def layer_of(name: str) -> tuple[int, str]:
    """A layer's number and what is cached of it, out of a name such as model.layers.3.attn."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    if len(numbers) != 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has no single layer number in its name; this model "
            f"can't be carried yet"
        )
    number = int(parts[numbers[0]])
    parts[numbers[0]] = "*"
    return number, ".".join(parts)


def _demand_carriable(name: str, view: CacheView) -> None:
    if len(view.shape) != 4 or min(view.shape, default=0) < 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has shape {list(view.shape)}, not [blocks, heads, tokens, "
            f"content]; what is no attention cache can't be carried yet"
        )
    if view.strides[3] != 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has gaps inside a token's content; choose another "
            f"attention backend"
        )


def _the_same(values: set[int], what: str, unit: str) -> int:
    if len(values) != 1:
        shown = ", ".join(map(str, sorted(values)))
        raise InputError(
            f"vLLM's layers have {what} {shown} {unit}, and all must have the same; give vLLM "
            f"--disable-hybrid-kv-cache-manager or another --block-size"
        )
    return values.pop()


def _order(views: Mapping[str, CacheView]) -> Order:
    """Whether heads or tokens come first in memory; with one head there is no difference."""
    found = {
        Order.HND if view.strides[1] >= view.strides[2] else Order.NHD
        for view in views.values()
        if view.shape[1] > 1
    }
    if len(found) > 1:
        raise InputError("vLLM's layers keep heads and tokens in different orders; use one backend")
    return found.pop() if found else Order.HND


class _Alike(NamedTuple):
    """This rank's layers of one kind that have the same blocks, which lie at that place."""

    place: int
    window: int | None
    layers: dict[int, str]


def _groups(
    views: Mapping[str, CacheView], engine: EngineShape, kept: Sequence[BlockGroup]
) -> dict[str, _Alike]:
    """Per group, the tensor of each of this rank's layers."""
    found: dict[str, _Alike] = {}
    for place, blocks in enumerate(kept):
        for cache in (cache for cache in views if cache in blocks.names):
            number, role = layer_of(cache)
            name = role if len(kept) == 1 else f"{role} {place}"
            alike = found.setdefault(name, _Alike(place, blocks.window, {}))
            alike.layers[number] = cache
    if len(found) == 1:
        found = {ONLY_GROUP: next(iter(found.values()))}
    for role, (_, _, layers) in found.items():
        beyond = sorted(set(layers) - set(engine.own_layers))
        if beyond:
            raise InputError(
                f"vLLM's cache {role!r:.200} has a layer {beyond[0]}, which the model's own "
                f"{engine.num_layers} layers have not; a draft model's cache can't be carried with "
                f"pipeline parallelism"
            )
        if len(engine.stages) > 1 and sorted(layers) != list(engine.own_layers):
            raise InputError(
                f"vLLM's cache {role!r:.200} is only in some of this pipeline stage's layers; "
                f"serve this model without pipeline parallelism or, if layers have windows, with "
                f"--disable-hybrid-kv-cache-manager"
            )
    return found


def _states(
    found: Mapping[str, _Alike], engine: EngineShape, kept: Sequence[BlockGroup]
) -> list[tuple[_Alike, PlacedState]]:
    """Per kind of recurrent state, the layers that have it and where it lies in their blocks."""
    placed = []
    for name, alike in found.items():
        spec = kept[alike.place].state
        if spec is not None:
            numbers = _numbers(alike, engine)
            own = place_states(name, numbers, spec, engine.state_sharding)
            placed += [(alike, each) for each in own]
    return placed


def _numbers(alike: _Alike, engine: EngineShape) -> list[int]:
    """The layers of a group; with several stages every layer is of every group, as was demanded."""
    several = len(engine.stages) > 1
    return list(range(engine.num_layers)) if several else sorted(alike.layers)


def _group(
    role: str,
    alike: _Alike,
    view: CacheView,
    engine: EngineShape,
    tensor: tuple[str, Paging],
) -> Group:
    _, num_heads, _, content = view.shape
    units = _units(role, num_heads, engine)
    name, paging = tensor
    kind = Paged() if alike.window is None else Window(paging.window_cells(alike.window))
    held = Tensor(name, DType.parse(view.dtype), content * paging.cell_tokens)
    return Group(role, kind, tuple(_numbers(alike, engine)), units, (held,))


def _units(role: str, num_heads: int, engine: EngineShape) -> int:
    """KV heads over all ranks: those of the model, or one that every rank has."""
    if num_heads == max(1, engine.num_heads // engine.tp):
        return engine.num_heads
    if num_heads == 1:
        return 1
    raise InputError(
        f"vLLM's cache {role!r:.200} has {num_heads} heads here, where {engine.num_heads} KV heads "
        f"over TP{engine.tp} make {max(1, engine.num_heads // engine.tp)}; choose another "
        f"attention backend"
    )
