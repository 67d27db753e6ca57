"""The geometry of SGLang's pools, in kvferry's words: layout, rank, and where each tensor lies.

SGLang keeps one K and one V buffer a layer (MLA: one buffer), pages of token rows of heads. A
buffer is a pointer, a length, and the length of a page. Which heads a rank has follows from
SGLang's two ways of dealing them out: evenly, with neighbours that share a head where there are
more ranks than heads; on a CPU it pads instead, and the padding, which no other side has, is
nobody's.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import (
    Base,
    CacheSpec,
    DType,
    Group,
    Holding,
    InputError,
    Layout,
    Memory,
    Paged,
    Parallel,
    Placement,
    PoolMap,
    ReasonCode,
    Refused,
    Span,
    Stated,
    Tensor,
    Window,
    attention_group,
)
from kvferry.integrations.sglang.states import StateBuffer, state_groups, state_placements

KV = "kv"
LATENT = "latent"
WINDOW = "window"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of its instance a scheduler is: one data-parallel replica's TP and PP."""

    tp: int
    tp_rank: int
    pp: int = 1
    pp_rank: int = 0

    @property
    def rank(self) -> int:
        """As kvferry counts."""
        return self.pp_rank * self.tp + self.tp_rank


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The model's KV heads, and their dimensions. ``padded``: this device pads them to ``tp``."""

    total: int
    k_dim: int
    v_dim: int
    padded: bool = False


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The KV buffers of one rank: K of every layer, then V; for MLA one of each layer."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    page_lengths: Sequence[int]
    layers: tuple[int, ...]
    page_tokens: int
    dtype: DType
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class WindowPool:
    """The pool of sliding-window layers, which have pages of their own for the last tokens."""

    num_tokens: int
    buffers: Buffers


@dataclass(frozen=True, kw_only=True)
class Cache:
    """What one rank has. ``heads`` is None for MLA; ``stages`` are the layers of each PP stage."""

    num_layers: int
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    place: Place
    heads: Heads | None
    buffers: Buffers
    states: tuple[StateBuffer, ...] = ()
    window: WindowPool | None = None


def layout_of(cache: Cache) -> Layout:
    """The whole instance's, the same on every rank of it."""
    place, heads = cache.place, cache.heads
    groups = (*_groups(cache), *state_groups(cache.states, place.tp))
    spec = CacheSpec(cache.num_layers, groups)
    if heads is not None and heads.padded and heads.total % place.tp:
        sharding: Parallel | Stated = _padded(cache, heads)
    else:
        sharding = Parallel(tp=place.tp, pp=place.pp, stages=cache.stages)
    return Layout(spec, sharding, page_tokens=cache.buffers.page_tokens)


def memory_of(cache: Cache) -> Memory:
    """This rank's pools, where SGLang has them."""
    placements: list[Placement] = []
    regions: list[tuple[int, int]] = []
    for group, buffers in zip(_groups(cache), _pools(cache), strict=True):
        _demand_all(group, buffers)
        for index in range(len(group.tensors)):
            placements.append(_placement(cache, group, buffers, index, len(regions)))
        regions += zip(buffers.addresses, buffers.lengths, strict=True)
    if not _has_heads(cache):
        return Memory.at(PoolMap(()), [])
    placements += state_placements(cache.states, cache.place.tp, len(regions))
    regions += [(state.address, state.length) for state in cache.states]
    device = cache.buffers.device
    return Memory.at(PoolMap(tuple(placements)), [(*region, device) for region in regions])


def head_span(heads: Heads, tp: int, tp_rank: int) -> Span:
    """The model's heads that a rank has; empty where it has padding alone."""
    if heads.padded and heads.total % tp:
        share = -(-heads.total // tp)
        first = min(tp_rank * share, heads.total)
        return Span(first, min(first + share, heads.total))
    return Parallel(tp=tp).unit_span(heads.total, tp_rank)


def _pools(cache: Cache) -> list[Buffers]:
    return [cache.buffers] + ([] if cache.window is None else [cache.window.buffers])


def _groups(cache: Cache) -> list[Group]:
    """Of what follows tokens, in the order of the pools."""
    dtype, heads, window = cache.buffers.dtype, cache.heads, cache.window
    if heads is None:
        elements = _row_bytes(cache.buffers, 0) // dtype.num_bytes
        return [Group(LATENT, Paged(), cache.layers, 1, (Tensor(LATENT, dtype, elements),))]
    its = (heads.total, heads.k_dim, heads.v_dim, dtype)
    groups = [attention_group(KV, Paged(), cache.layers, *its)]
    if window is not None:
        kind = Window(window.num_tokens)
        groups.append(attention_group(WINDOW, kind, window.buffers.layers, *its))
    return groups


def _padded(cache: Cache, heads: Heads) -> Stated:
    """Rank by rank, because the padded heads are not the model's."""
    place = cache.place
    if cache.states:
        raise InputError(
            f"{place.tp} ranks do not divide the model's {heads.total} KV heads, which is not "
            f"supported for a model with state; use a --tp-size that does"
        )
    stages = Parallel(pp=place.pp, stages=cache.stages).stage_spans(cache.num_layers)
    names = [group.name for group in _groups(cache)]
    ranks = tuple(
        tuple(Holding(name, stage, units) for name in names if len(units))
        for stage in stages
        for units in (head_span(heads, place.tp, rank) for rank in range(place.tp))
    )
    return Stated(ranks, lead=(place.pp - 1) * place.tp)


def _has_heads(cache: Cache) -> bool:
    heads = cache.heads
    return heads is None or len(head_span(heads, cache.place.tp, cache.place.tp_rank)) > 0


def _placement(
    cache: Cache, group: Group, buffers: Buffers, index: int, first_region: int
) -> Placement:
    tensor = group.tensors[index]
    first = index * len(buffers.layers)
    _demand_alike(buffers, first, tensor.name)
    row = _row_bytes(buffers, first)
    _demand_row(cache, tensor, row)
    regions = {layer: first_region + first + place for place, layer in enumerate(buffers.layers)}
    bases = tuple(Base(layer, regions[layer], 0) for layer in sorted(buffers.layers))
    return Placement(
        group.name,
        tensor.name,
        buffers.page_lengths[first],
        row,
        tensor.unit_bytes,
        min(buffers.lengths[first : first + len(buffers.layers)]) // buffers.page_lengths[first],
        bases,
    )


def _row_bytes(buffers: Buffers, buffer: int) -> int:
    """What a token takes in one buffer."""
    row, rest = divmod(buffers.page_lengths[buffer], buffers.page_tokens)
    if rest:
        raise InputError(
            f"a page of {buffers.page_lengths[buffer]} bytes does not hold "
            f"{buffers.page_tokens} equal rows; this KV layout is not supported"
        )
    return row


def _demand_all(group: Group, buffers: Buffers) -> None:
    if len(buffers.addresses) != len(group.tensors) * len(buffers.layers):
        raise InputError(
            f"SGLang has {len(buffers.addresses)} KV buffers for {len(buffers.layers)} layers of "
            f"{' and '.join(tensor.name for tensor in group.tensors)}; this pool is not supported"
        )


def _demand_alike(buffers: Buffers, first: int, tensor: str) -> None:
    lengths = set(buffers.page_lengths[first : first + len(buffers.layers)])
    if len(lengths) != 1:
        raise InputError(
            f"{tensor} has pages of {sorted(lengths)} bytes in different layers; "
            f"this pool is not supported"
        )


def _demand_row(cache: Cache, tensor: Tensor, row: int) -> None:
    """SGLang's rows have the heads that we think they have."""
    heads = cache.heads
    if heads is None:
        return
    place = cache.place
    share = -(-heads.total // place.tp) if heads.padded else max(1, heads.total // place.tp)
    if row != share * tensor.unit_bytes:
        raise Refused.because(
            ReasonCode.HEAD_DIM,
            f"SGLang's rows of {tensor.name} have {row} bytes, and {share} of {heads.total} heads "
            f"of {tensor.elements} {tensor.dtype} elements would have "
            f"{share * tensor.unit_bytes}; this KV layout is not supported",
        )
