"""Index keys of SGLang's sparse attention (DeepSeek V3.2), as a paged group. Pure.

SGLang has a buffer per layer, with the same pages as the latent. Within a page all keys precede all
scales. Every rank holds all index keys. Layers that reuse the indices of the layer below have an
empty buffer, and are not part of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry import Base, DType, Group, InputError, Paged, Placement, Tensor
from kvferry.connectors.sglang.pools import Buffers, SglangCache

INDEX = "index"
KEY, SCALE = Tensor("key", DType.FLOAT8_E4M3, 128), Tensor("scale", DType.FLOAT32, 1)


def with_index_keys(buffers: Buffers, *, staged: bool) -> Buffers:
    """Return the buffers of the layers that have index keys.

    With pipeline stages all layers must have some, because a stage knows only its own.
    """
    kept = [i for i, length in enumerate(buffers.lengths) if length]
    if staged and len(kept) < len(buffers.lengths):
        raise InputError(
            "kvferry's SGLang backend does not support pipeline parallelism of a model whose "
            "layers share index keys: use --pp-size 1"
        )
    return replace(
        buffers,
        addresses=[buffers.addresses[i] for i in kept],
        lengths=[buffers.lengths[i] for i in kept],
        page_lengths=[buffers.page_lengths[i] for i in kept],
        layers=tuple(buffers.layers[i] for i in kept),
    )


def index_groups(cache: SglangCache) -> list[Group]:
    """Return the group of index keys, if the model has any."""
    if cache.index is None:
        return []
    layers = cache.index.layers if cache.position.pp == 1 else cache.layers
    return [Group(INDEX, Paged(), layers, 1, (KEY, SCALE))]


def index_placements(buffers: Buffers, first_region: int) -> list[Placement]:
    """Return the placements on this rank; regions are numbered from ``first_region``."""
    page = buffers.page_tokens * (KEY.unit_bytes + SCALE.unit_bytes)
    if set(buffers.page_lengths) != {page}:
        raise InputError(
            f"SGLang's index keys have pages of {sorted(set(buffers.page_lengths))} bytes, not "
            f"{page} for {buffers.page_tokens} tokens; index keys shared by several tokens "
            f"are not supported"
        )
    num_pages = min(buffers.lengths) // page
    return [
        Placement(INDEX, tensor.name, page, tensor.unit_bytes, tensor.unit_bytes, num_pages, bases)
        for tensor, bases in (
            (KEY, _bases(buffers, first_region, 0)),
            (SCALE, _bases(buffers, first_region, buffers.page_tokens * KEY.unit_bytes)),
        )
    ]


def check_same_pages(pages: Sequence[int], named: Sequence[int]) -> None:
    """Raise ``InputError`` if SGLang lists other pages for auxiliary pools than for K and V."""
    if list(named[len(named) - len(pages) :]) != list(pages):
        raise InputError(
            f"the {len(named)} pages that SGLang listed for index keys or block scales do not end "
            f"with the {len(pages)} of K and V; disable --enable-unified-memory and HiSparse"
        )


def _bases(buffers: Buffers, first_region: int, offset: int) -> tuple[Base, ...]:
    return tuple(Base(layer, first_region + i, offset) for i, layer in enumerate(buffers.layers))
