"""The geometry of SGLang's pools, in kvferry's words: layout, rank, and where each tensor lies.

SGLang keeps one K and one V buffer a layer (MLA: one buffer), pages of token rows of heads. A
buffer is a pointer, a length, and the length of a page. Which heads a rank has follows from
SGLang's two ways of dealing them out: evenly, with neighbours that share a head where there are
more ranks than heads; on a CPU it pads instead, and the padding, which no other side has, is
nobody's. Block scales and a draft's cache are pools of the same form; a draft's heads are its own.

Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvferry import (
    Base,
    CacheSpec,
    ExplicitSharding,
    Group,
    InputError,
    Layout,
    Memory,
    Paged,
    Parallel,
    Placement,
    PoolMap,
    ReasonCode,
    Refused,
    Shard,
    Span,
    Tensor,
    Window,
    attention_group,
)
from kvferry.connectors.sglang.index_keys import index_groups, index_placements
from kvferry.connectors.sglang.pools import Buffers, Heads, Place, SglangCache
from kvferry.connectors.sglang.states import state_groups, state_placements

KV = "kv"
LATENT = "latent"
WINDOW = "window"


def layout_of(cache: SglangCache) -> Layout:
    """The whole instance's, the same on every rank of it."""
    place, parts = cache.place, _parts(cache)
    groups = (
        *(part.group for part in parts),
        *index_groups(cache),
        *state_groups(cache.states, place.tp),
    )
    spec = CacheSpec(cache.num_layers, groups)
    if any(_is_padded(part.heads) for part in parts):
        sharding: Parallel | ExplicitSharding = _padded(cache)
    else:
        sharding = Parallel(tp=place.tp, pp=place.pp, stages=cache.stages)
    return Layout(spec, sharding, page_tokens=cache.buffers.page_tokens)


def memory_of(cache: SglangCache) -> Memory:
    """This rank's pools, where SGLang has them."""
    placements: list[Placement] = []
    regions: list[tuple[int, int]] = []
    for part in _parts(cache):
        _demand_all(part)
        if not len(_units(part.heads, cache.place)):
            continue
        for index in range(len(part.group.tensors)):
            placements.append(_placement(cache.place, part, index, len(regions)))
        regions += zip(part.buffers.addresses, part.buffers.lengths, strict=True)
    if cache.index is not None:
        placements += index_placements(cache.index, len(regions))
        regions += zip(cache.index.addresses, cache.index.lengths, strict=True)
    placements += state_placements(cache.states, cache.place.tp, len(regions))
    regions += [(state.address, state.length) for state in cache.states]
    device = cache.buffers.device
    return Memory.at(PoolMap(tuple(placements)), [(*region, device) for region in regions])


def head_span(heads: Heads, tp: int, tp_rank: int) -> Span:
    """The model's heads that a rank has; empty where it has padding alone."""
    if _is_padded(heads):
        share = heads.with_padding // tp
        first = min(tp_rank * share, heads.total)
        return Span(first, min(first + share, heads.total))
    return Parallel(tp=tp).unit_span(heads.total, tp_rank)


class _PoolPart(NamedTuple):
    """A group of what follows tokens, and the buffers that this rank has of it."""

    group: Group
    buffers: Buffers
    heads: Heads | None


def _parts(cache: SglangCache) -> list[_PoolPart]:
    """All that has one tensor or more a layer, by heads or whole."""
    heads, window = cache.heads, cache.window
    name = LATENT if heads is None else KV
    parts = [_part(name, Paged(), cache.layers, heads, cache.buffers)]
    if window is not None:
        kind = Window(window.num_tokens)
        parts.append(_part(WINDOW, kind, window.buffers.layers, heads, window.buffers))
    for pool in cache.beside:
        parts.append(_part(pool.name, Paged(), pool.layers, pool.heads, pool.buffers))
    return parts


def _part(
    name: str, kind: Paged | Window, layers: tuple[int, ...], heads: Heads | None, buffers: Buffers
) -> _PoolPart:
    dtype = buffers.dtype
    if heads is None:
        latent = Tensor(LATENT, dtype, _row_bytes(buffers, 0) // dtype.num_bytes)
        return _PoolPart(Group(name, kind, layers, 1, (latent,)), buffers, None)
    its = (heads.total, heads.k_dim, heads.v_dim, dtype)
    return _PoolPart(attention_group(name, kind, layers, *its), buffers, heads)


def _is_padded(heads: Heads | None) -> bool:
    return heads is not None and heads.with_padding > heads.total


def _units(heads: Heads | None, place: Place) -> Span:
    return Span(0, 1) if heads is None else head_span(heads, place.tp, place.tp_rank)


def _padded(cache: SglangCache) -> ExplicitSharding:
    """Rank by rank, because the padded heads are not the model's."""
    place = cache.place
    if cache.states:
        raise InputError(
            "a --tp-size that does not divide the model's KV heads is not supported for a model "
            "with state; use one that does"
        )
    stages = Parallel(pp=place.pp, stages=cache.stages).stage_spans(cache.num_layers)
    shared = [(group.name, None) for group in index_groups(cache)]
    named = [*((part.group.name, part.heads) for part in _parts(cache)), *shared]
    ranks = tuple(
        tuple(
            Shard(name, stage, units)
            for name, its in named
            if len(units := _units(its, replace(place, tp_rank=rank)))
        )
        for stage in stages
        for rank in range(place.tp)
    )
    return ExplicitSharding(ranks, lead=(place.pp - 1) * place.tp)


def _placement(place: Place, part: _PoolPart, index: int, first_region: int) -> Placement:
    group, buffers = part.group, part.buffers
    tensor = group.tensors[index]
    first = index * len(buffers.layers)
    _demand_alike(buffers, first, tensor.name)
    row = _row_bytes(buffers, first)
    _demand_row(place, part.heads, tensor, row)
    regions = {layer: first_region + first + at for at, layer in enumerate(buffers.layers)}
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


def _demand_all(part: _PoolPart) -> None:
    group, buffers = part.group, part.buffers
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


def _demand_row(place: Place, heads: Heads | None, tensor: Tensor, row: int) -> None:
    """SGLang's rows have the heads that we think they have."""
    if heads is None:
        return
    share = max(1, heads.with_padding // place.tp)
    if row != share * tensor.unit_bytes:
        raise Refused.because(
            ReasonCode.HEAD_DIM,
            f"SGLang's rows of {tensor.name} have {row} bytes, and {share} of {heads.total} heads "
            f"of {tensor.elements} {tensor.dtype} elements would have "
            f"{share * tensor.unit_bytes}; this KV layout is not supported",
        )
