"""Index keys of SGLang's sparse attention (DeepSeek V3.2), in kvferry's words: a paged group.

One buffer a layer, in the pages of the latent. Inside a page the keys of all its tokens come first
and then their scales. Every rank has all of it. A layer that looks where the one below has looked
has an empty buffer, and is not of the group.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry import Base, DType, Group, InputError, Paged, Placement, Tensor
from kvferry.connectors.sglang.pools import Buffers, SglangCache

INDEX = "index"
KEY, SCALE = Tensor("key", DType.FLOAT8_E4M3, 128), Tensor("scale", DType.FLOAT32, 1)


def filled(buffers: Buffers, *, staged: bool) -> Buffers:
    """Without the layers that have no index keys; a stage does not know those of the others."""
    kept = [place for place, length in enumerate(buffers.lengths) if length]
    if staged and len(kept) < len(buffers.lengths):
        raise InputError(
            "kvferry's SGLang backend does not support pipeline parallelism of a model whose "
            "layers share index keys: use --pp-size 1"
        )
    return replace(
        buffers,
        addresses=[buffers.addresses[place] for place in kept],
        lengths=[buffers.lengths[place] for place in kept],
        page_lengths=[buffers.page_lengths[place] for place in kept],
        layers=tuple(buffers.layers[place] for place in kept),
    )


def index_groups(cache: SglangCache) -> list[Group]:
    """The model's index keys, if it has any."""
    if cache.index is None:
        return []
    layers = cache.index.layers if cache.place.pp == 1 else cache.layers
    return [Group(INDEX, Paged(), layers, 1, (KEY, SCALE))]


def index_placements(buffers: Buffers, first_region: int) -> list[Placement]:
    """Where they lie on this rank; each buffer is a region, from the given one on."""
    page = buffers.page_tokens * (KEY.unit_bytes + SCALE.unit_bytes)
    if set(buffers.page_lengths) != {page}:
        raise InputError(
            f"SGLang has pages of {sorted(set(buffers.page_lengths))} bytes of index keys, and "
            f"{buffers.page_tokens} tokens would take {page}; index keys of several tokens in "
            f"one are not supported"
        )
    num_pages = min(buffers.lengths) // page
    return [
        Placement(INDEX, tensor.name, page, tensor.unit_bytes, tensor.unit_bytes, num_pages, bases)
        for tensor, bases in (
            (KEY, _bases(buffers, first_region, 0)),
            (SCALE, _bases(buffers, first_region, buffers.page_tokens * KEY.unit_bytes)),
        )
    ]


def demand_same_pages(pages: Sequence[int], named: Sequence[int]) -> None:
    """Refuse where SGLang names other pages for what lies beside K and V than for these."""
    if list(named[len(named) - len(pages) :]) != list(pages):
        raise InputError(
            f"SGLang named {len(named)} pages for what it keeps beside K and V, and they are not "
            f"the last {len(pages)} of those; leave --enable-unified-memory and HiSparse out"
        )


def _bases(buffers: Buffers, first_region: int, offset: int) -> tuple[Base, ...]:
    return tuple(
        Base(layer, first_region + place, offset) for place, layer in enumerate(buffers.layers)
    )
