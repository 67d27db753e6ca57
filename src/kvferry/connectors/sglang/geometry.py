"""Translation of SGLang's pools to a layout and placements. Pure.

SGLang has a K and a V buffer per layer (MLA: one buffer), with pages of token rows of heads. It
distributes heads in two ways. Usually it splits them evenly, and adjacent ranks share a head if
there are more ranks than heads. On a CPU it pads the heads; the padding belongs to no rank in the
layout, because the other side does not have it. Block scales and a draft's cache have the same
form; a draft has its own heads.
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
from kvferry.connectors.sglang.pools import Buffers, KvHeads, RankPosition, SglangCache
from kvferry.connectors.sglang.states import state_groups, state_placements

KV = "kv"
LATENT = "latent"
WINDOW = "window"


def layout_of(cache: SglangCache) -> Layout:
    """Return the layout of the whole instance; it is the same on every rank."""
    position, parts = cache.position, _parts(cache)
    groups = (
        *(part.group for part in parts),
        *index_groups(cache),
        *state_groups(cache.states, position.tp, cache.state_layers),
    )
    spec = CacheSpec(cache.num_layers, groups)
    if any(_is_padded(part.heads) for part in parts):
        sharding: Parallel | ExplicitSharding = _padded(cache)
    else:
        sharding = Parallel(tp=position.tp, pp=position.pp, stages=cache.stages, dcp=position.dcp)
    return Layout(spec, sharding, page_tokens=cache.buffers.page_tokens)


def memory_of(cache: SglangCache) -> Memory:
    """Return this rank's pools."""
    placements: list[Placement] = []
    regions: list[tuple[int, int]] = []
    for part in _parts(cache):
        _check_num_buffers(part)
        if not len(_units(part.heads, cache.position)) or not part.buffers.layers:
            continue
        for index in range(len(part.group.tensors)):
            placements.append(_placement(cache.position, part, index, len(regions)))
        regions += zip(part.buffers.addresses, part.buffers.lengths, strict=True)
    if cache.index is not None:
        placements += index_placements(cache.index, len(regions))
        regions += zip(cache.index.addresses, cache.index.lengths, strict=True)
    placements += state_placements(cache.states, cache.position.tp, len(regions))
    regions += [(state.address, state.length) for state in cache.states]
    device = cache.buffers.device
    return Memory.at(PoolMap(tuple(placements)), [(*region, device) for region in regions])


def head_span(heads: KvHeads, tp: int, tp_rank: int) -> Span:
    """Return the model's heads that a rank has; empty if it has only padding."""
    if _is_padded(heads):
        share = heads.with_padding // tp
        first = min(tp_rank * share, heads.total)
        return Span(first, min(first + share, heads.total))
    return Parallel(tp=tp).unit_span(heads.total, tp_rank)


class _PoolPart(NamedTuple):
    """A group of the layout, and this rank's buffers of it."""

    group: Group
    buffers: Buffers
    heads: KvHeads | None


def _parts(cache: SglangCache) -> list[_PoolPart]:
    """Return the groups of K and V, the latent, windows and auxiliary pools."""
    heads, window = cache.heads, cache.window
    name = LATENT if heads is None else KV
    parts = [_part(name, Paged(), cache.layers, heads, cache.buffers)]
    if window is not None:
        kind = Window(window.num_tokens)
        parts.append(_part(WINDOW, kind, window.layers, heads, window.buffers))
    for pool in cache.auxiliary:
        parts.append(_part(pool.name, Paged(), pool.layers, pool.heads, pool.buffers))
    return parts


def _part(
    name: str,
    kind: Paged | Window,
    layers: tuple[int, ...],
    heads: KvHeads | None,
    buffers: Buffers,
) -> _PoolPart:
    dtype = buffers.dtype
    if heads is None:
        latent = Tensor(LATENT, dtype, _row_bytes(buffers, 0) // dtype.num_bytes)
        return _PoolPart(Group(name, kind, layers, 1, (latent,)), buffers, None)
    its = (heads.total, heads.k_dim, heads.v_dim, dtype)
    return _PoolPart(attention_group(name, kind, layers, *its), buffers, heads)


def _is_padded(heads: KvHeads | None) -> bool:
    return heads is not None and heads.with_padding > heads.total


def _units(heads: KvHeads | None, position: RankPosition) -> Span:
    if heads is None:
        return Span(0, 1)
    # Ranks that take turns at tokens have the same heads.
    return head_span(heads, position.tp // position.dcp, position.tp_rank // position.dcp)


def _padded(cache: SglangCache) -> ExplicitSharding:
    """Return the sharding rank by rank, because padded heads are not part of the model."""
    position = cache.position
    if cache.states:
        raise InputError("a model with state needs a --tp-size that divides its KV heads")
    stages = Parallel(pp=position.pp, stages=cache.stages).stage_spans(cache.num_layers)
    shared = [(group.name, None) for group in index_groups(cache)]
    named = [*((part.group.name, part.heads) for part in _parts(cache)), *shared]
    ranks = tuple(
        tuple(
            Shard(name, stage, units)
            for name, its in named
            if len(units := _units(its, replace(position, tp_rank=rank)))
        )
        for stage in stages
        for rank in range(position.tp)
    )
    return ExplicitSharding(ranks, lead=(position.pp - 1) * position.tp)


def _placement(position: RankPosition, part: _PoolPart, index: int, first_region: int) -> Placement:
    group, buffers = part.group, part.buffers
    tensor = group.tensors[index]
    first = index * len(buffers.layers)
    _check_page_lengths(buffers, first, tensor.name)
    row = _row_bytes(buffers, first)
    _check_row_bytes(position, part.heads, tensor, row)
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
    """Return the bytes of a token in one buffer."""
    row, rest = divmod(buffers.page_lengths[buffer], buffers.page_tokens)
    if rest:
        raise InputError(
            f"a page of {buffers.page_lengths[buffer]} bytes does not hold "
            f"{buffers.page_tokens} equal rows; this KV layout is not supported"
        )
    return row


def _check_num_buffers(part: _PoolPart) -> None:
    group, buffers = part.group, part.buffers
    if len(buffers.addresses) != len(group.tensors) * len(buffers.layers):
        raise InputError(
            f"SGLang has {len(buffers.addresses)} KV buffers for {len(buffers.layers)} layers of "
            f"{' and '.join(tensor.name for tensor in group.tensors)}; this pool is not supported"
        )


def _check_page_lengths(buffers: Buffers, first: int, tensor: str) -> None:
    lengths = set(buffers.page_lengths[first : first + len(buffers.layers)])
    if len(lengths) != 1:
        raise InputError(
            f"{tensor} has pages of {sorted(lengths)} bytes in different layers; "
            f"this pool is not supported"
        )


def _check_row_bytes(
    position: RankPosition, heads: KvHeads | None, tensor: Tensor, row: int
) -> None:
    """Check that SGLang's rows have the expected size."""
    if heads is None:
        return
    share = max(1, heads.with_padding // (position.tp // position.dcp))
    if row != share * tensor.unit_bytes:
        raise Refused.because(
            ReasonCode.HEAD_DIM,
            f"SGLang's rows of {tensor.name} have {row} bytes, but {share} of {heads.total} heads "
            f"of {tensor.elements} {tensor.dtype} elements need "
            f"{share * tensor.unit_bytes}; this KV layout is not supported",
        )
