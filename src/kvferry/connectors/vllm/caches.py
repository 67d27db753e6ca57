"""vLLM's registered caches as a kvferry layout, from their shapes and strides.

Since vLLM 0.32 each layer's cache is a view ``[blocks, heads, tokens, content]``, whatever the
order in memory. On a GPU the content is a token's K and V of one head, one after the other: two
packed tensors. An MLA latent is one tensor. CPU kernels keep the K of a (block, head) by columns,
and behind it V by rows. If they keep it in a form that is not known, a page of one head is one cell
(``paging.py``). Layers of the same kind with the same blocks form a group. Recurrent state is
registered as bytes (``states.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
    Pattern,
    Tensor,
    Window,
)
from kvferry.connectors.states import StatePart
from kvferry.connectors.vllm.index_keys import holds_index_keys, index_tensors
from kvferry.connectors.vllm.paging import BlockTables, Paging
from kvferry.connectors.vllm.states import PlacedState, StateSharding, StateSpec, place_states

ONLY_GROUP = "kv"
K, V = "k", "v"


class CacheView(NamedTuple):
    """Shape, strides (in elements) and dtype of a registered tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class EngineShape(NamedTuple):
    """Sharding of an engine as seen by one rank, and the whole model's KV heads.

    ``stages``: number of layers of each pipeline stage. ``num_heads``: 1 with MLA.
    ``channels_first`` and ``bc_groups`` describe recurrent state, as in ``StateSharding``. The last
    three are sizes of context parallelism.

    ``k_dim``: elements of K in a head; None if the content has no K and V of this size.
    ``has_columns``: whether CPU kernels keep K by columns.
    """

    tp: int
    stages: tuple[int, ...]
    rank: int
    num_heads: int
    block_tokens: int
    on_cpu: bool
    channels_first: bool = False
    bc_groups: int | None = None
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    k_dim: int | None = None
    has_columns: bool = False

    @property
    def sharding(self) -> Parallel:
        """Sharding of the whole engine.

        Ranks of prefill context parallelism (PCP) have copies, unless they are among those that
        share tokens (DCP): all PCP ranks, and all TP ranks or none.
        """
        divided = self.pcp if self.dcp > 1 else 1
        return Parallel(
            tp=self.tp,
            pp=len(self.stages),
            stages=self.stages,
            cp=divided,
            dcp=self.dcp // divided,
            interleave=self.interleave,
            copies=self.pcp // divided,
        )

    @property
    def state_sharding(self) -> StateSharding:
        """Sharding of recurrent state."""
        return StateSharding(self.tp, self.channels_first, self.bc_groups)

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return sum(self.stages)

    def with_draft(self, last: int) -> EngineShape:
        """Return a shape that includes a draft model's layers, up to number ``last``.

        Their numbers follow the model's own. With pipeline stages they are not supported.
        """
        if len(self.stages) > 1:
            return self
        return self._replace(stages=(max(self.num_layers, last + 1),))

    @property
    def own_layers(self) -> range:
        """Layers of this rank's pipeline stage."""
        stage = self.rank // (self.pcp * self.tp)
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])


class EntryForm(NamedTuple):
    """How many tokens an entry stands for, and names and bytes of its parts.

    A page keeps each part of all its entries, one part after the other. Without parts it keeps
    whole entries.
    """

    tokens: int = 1
    parts: tuple[tuple[str, int], ...] = ()


PLAIN = EntryForm()


class BlockGroup(NamedTuple):
    """One of vLLM's cache groups: layers with the same blocks.

    ``window``: how many tokens before the next one are kept; None for all. ``state``: set for
    recurrent layers, which keep no tokens. ``block_tokens``: those of a block on one rank; None if
    all groups have the engine's. ``forms``: caches whose entries are not plain.
    """

    names: frozenset[str]
    window: int | None = None
    state: StateSpec | None = None
    block_tokens: int | None = None
    forms: Mapping[str, EntryForm] = {}


class CachePlan(NamedTuple):
    """The layout, the mapping of blocks, and the caches by group and layer.

    ``states`` has the parts of a block's bytes that hold recurrent state, with their layers.
    """

    layout: Layout
    tables: BlockTables
    names: dict[str, dict[int, str]]
    states: tuple[tuple[StatePart, dict[int, str]], ...] = ()


def plan_caches(
    views: Mapping[str, CacheView], engine: EngineShape, kept: Sequence[BlockGroup] = ()
) -> CachePlan:
    """Return the layout of an engine's caches. Raises ``InputError`` if it is not supported.

    Without ``kept`` all layers are in one cache group and keep all tokens.
    """
    kept = kept or [BlockGroup(frozenset(views))]
    engine = engine.with_draft(max((layer_of(name)[0] for name in views), default=-1))
    found = _groups(views, engine, kept)
    placed = _states(found, engine, kept)
    found = {name: alike for name, alike in found.items() if kept[alike.place].state is None}
    views = {name: views[name] for alike in found.values() for name in alike.layers.values()}
    if not views:
        raise InputError("vLLM registered no KV cache of attention; this model is not supported")
    for name, view in views.items():
        _check_view(name, view)
    has_columns = engine.has_columns and all(_has_k_and_v(view, engine) for view in views.values())
    own = _pagings(found, views, engine, whole_pages=engine.on_cpu and not has_columns)
    blocks = (each.block_tokens or engine.block_tokens for each in kept if each.state is None)
    first, held = next(iter(own.values())), engine.sharding.tokens(engine.rank)
    paging = Paging(math.lcm(*blocks), first.page_tokens, first.whole_pages, engine.dcp, held)
    order = _order(views)
    groups = tuple(
        _group(name, alike, views[min(alike.layers.items())[1]], engine, own[name])
        for name, alike in found.items()
    )
    of_k_and_v = [group.name for group in groups if _names(group) == (K, V)]
    of_states = [(alike, group) for alike, own in placed for group in own.groups]
    spec = CacheSpec(engine.num_layers, groups + tuple(group for _, group in of_states))
    layout = Layout(
        spec,
        engine.sharding,
        page_tokens=paging.layout_page,
        group_pages=tuple(
            (name, each.layout_page)
            for name, each in own.items()
            if each.layout_page != paging.layout_page
        ),
        order=order,
        packed=() if engine.on_cpu else tuple(of_k_and_v),
        transposed=tuple(f"{name}.{K}" for name in of_k_and_v) if engine.on_cpu else (),
    )
    tables = BlockTables(
        paging,
        groups,
        {name: alike.place for name, alike in found.items()},
        {group.name: alike.place for alike, group in of_states},
        {name: each for name, each in own.items() if each != paging},
    )
    names = {name: alike.layers for name, alike in found.items()}
    parts = tuple((part, alike.layers) for alike, own in placed for part in own.parts)
    return CachePlan(layout, tables, names, parts)


def layer_of(name: str) -> tuple[int, str]:
    """Return the layer number in a name such as model.layers.3.attn, and the name without it."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    if len(numbers) != 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has no single layer number in its name; this model "
            f"is not supported yet"
        )
    number = int(parts[numbers[0]])
    parts[numbers[0]] = "*"
    return number, ".".join(parts)


def _check_view(name: str, view: CacheView) -> None:
    if len(view.shape) != 4 or min(view.shape, default=0) < 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has shape {list(view.shape)}, not [blocks, heads, tokens, "
            f"content]; only attention caches are supported yet"
        )
    if view.strides[3] != 1:
        raise InputError(
            f"vLLM's cache {name!r:.200} has gaps inside a token's content; choose another "
            f"attention backend"
        )


def _pagings(
    found: Mapping[str, _Alike],
    views: Mapping[str, CacheView],
    engine: EngineShape,
    *,
    whole_pages: bool,
) -> dict[str, Paging]:
    """Return the block and page sizes of each group."""
    held = engine.sharding.tokens(engine.rank)
    pagings: dict[str, Paging] = {}
    for name, alike in found.items():
        pages = {views[cache].shape[2] for cache in alike.layers.values()}
        if len(pages) > 1:
            raise InputError(
                f"vLLM's caches {name!r:.200} of one cache group have pages of "
                f"{_listed(pages)} entries; choose another --block-size"
            )
        ratio = alike.form.tokens
        # The layout refuses turns that cut an entry.
        mine = held.intersect(Pattern.interleaved(ratio - 1, ratio)) or held
        block = alike.block_tokens or engine.block_tokens
        pagings[name] = Paging(block, pages.pop() * ratio, whole_pages, engine.dcp, mine, ratio)
    sizes = {each.page_tokens for each in pagings.values()}
    if whole_pages and (len(sizes) > 1 or any(a.form != PLAIN for a in found.values())):
        raise InputError(
            f"vLLM's cache groups have blocks of {_listed(sizes)} tokens, or entries for several "
            f"tokens, which can't be carried in the form in which its CPU kernels keep them; use a "
            f"GPU, or give vLLM --disable-hybrid-kv-cache-manager"
        )
    return pagings


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _order(views: Mapping[str, CacheView]) -> Order:
    """Return whether heads or tokens come first in memory. With one head there is no difference."""
    found = {
        Order.HND if view.strides[1] >= view.strides[2] else Order.NHD
        for view in views.values()
        if view.shape[1] > 1
    }
    if len(found) > 1:
        raise InputError("vLLM's layers keep heads and tokens in different orders; use one backend")
    return found.pop() if found else Order.HND


class _Alike(NamedTuple):
    """This rank's layers of one kind in one cache group. ``place`` is the group's index."""

    place: int
    window: int | None
    layers: dict[int, str]
    block_tokens: int | None = None
    form: EntryForm = PLAIN


def _groups(
    views: Mapping[str, CacheView], engine: EngineShape, kept: Sequence[BlockGroup]
) -> dict[str, _Alike]:
    """Return the caches of this rank's layers, by group and layer."""
    found: dict[str, _Alike] = {}
    for place, blocks in enumerate(kept):
        for cache in (cache for cache in views if cache in blocks.names):
            number, role = layer_of(cache)
            name = role if len(kept) == 1 else f"{role} {place}"
            form = blocks.forms.get(cache, PLAIN)
            name = name if form.tokens == 1 else f"{name} by {form.tokens}"
            new = _Alike(place, blocks.window, {}, blocks.block_tokens, form)
            alike = found.setdefault(name, new)
            alike.layers[number] = cache
    if len(found) == 1:
        found = {ONLY_GROUP: next(iter(found.values()))}
    for role, layers in ((role, alike.layers) for role, alike in found.items()):
        beyond = sorted(set(layers) - set(engine.own_layers))
        if beyond:
            raise InputError(
                f"vLLM's cache {role!r:.200} has a layer {beyond[0]}, which the model's own "
                f"{engine.num_layers} layers have not; a draft model is not supported with "
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
    """Return each kind of recurrent state with its layers and its position in their blocks."""
    placed = []
    for name, alike in found.items():
        spec = kept[alike.place].state
        if spec is not None:
            numbers = _numbers(alike, engine)
            own = place_states(name, numbers, spec, engine.state_sharding)
            placed += [(alike, each) for each in own]
    return placed


def _numbers(alike: _Alike, engine: EngineShape) -> list[int]:
    """Return a group's layers over all stages. ``_groups`` demands all if there are several."""
    several = len(engine.stages) > 1
    return list(range(engine.num_layers)) if several else sorted(alike.layers)


def _group(
    role: str,
    alike: _Alike,
    view: CacheView,
    engine: EngineShape,
    paging: Paging,
) -> Group:
    units = _units(role, view.shape[1], engine)
    kind = Paged() if alike.window is None else Window(paging.window_cells(alike.window))
    tensors = _tensors(min(alike.layers.items())[1], view, engine, paging, alike.form.parts)
    numbers = tuple(_numbers(alike, engine))
    return Group(role, kind, numbers, units, tensors, alike.form.tokens)


def _tensors(
    cache: str,
    view: CacheView,
    engine: EngineShape,
    paging: Paging,
    parts: tuple[tuple[str, int], ...],
) -> tuple[Tensor, ...]:
    dtype, content = DType.parse(view.dtype), view.shape[3]
    if paging.whole_pages:
        name = f"blocks_of_{paging.page_tokens}_tokens"
        return (Tensor(name, dtype, content * paging.page_tokens),)
    if parts:
        if sum(width for _, width in parts) != content * dtype.num_bytes:
            raise InputError(
                f"vLLM's cache {cache!r:.200} has {content * dtype.num_bytes} bytes for an entry, "
                f"not {' + '.join(str(width) for _, width in parts)}; this form is not supported"
            )
        return tuple(Tensor(part, DType.UINT8, width) for part, width in parts)
    if holds_index_keys(cache):
        return index_tensors(cache, content * dtype.num_bytes)
    if _has_k_and_v(view, engine):
        return Tensor(K, dtype, content // 2), Tensor(V, dtype, content // 2)
    return (Tensor("content", dtype, content),)


def _has_k_and_v(view: CacheView, engine: EngineShape) -> bool:
    """Return whether the content is K and V of the same size, without scales or padding."""
    return engine.k_dim is not None and view.shape[3] == 2 * engine.k_dim


def _names(group: Group) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in group.tensors)


def _units(role: str, num_heads: int, engine: EngineShape) -> int:
    """Return the KV heads over all ranks: the model's, or one that is replicated."""
    if num_heads == max(1, engine.num_heads // engine.tp):
        return engine.num_heads
    if num_heads == 1:
        return 1
    raise InputError(
        f"vLLM's cache {role!r:.200} has {num_heads} heads here, where {engine.num_heads} KV heads "
        f"over TP{engine.tp} make {max(1, engine.num_heads // engine.tp)}; choose another "
        f"attention backend"
    )
