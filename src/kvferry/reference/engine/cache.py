"""One rank's cache memory: a single region, and a tensor view of each layer in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from kvferry import (
    Base,
    Device,
    DType,
    Layout,
    Order,
    Placement,
    PoolMap,
    Pools,
    Region,
    contiguous_pools,
)

# Each layer begins on a memory page, so that copies of whole pages are aligned.
ALIGNMENT = 4096
TORCH_DTYPES = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
}


class RankCache:
    """One rank's cache. A single region means one registration with a transport.

    ``allocate`` must return zeroed memory: attention reads unwritten entries under a mask.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        num_pages: int,
        device: torch.device,
        allocate: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.pools = one_region(contiguous_pools(layout, rank, num_pages))
        (num_bytes,) = self.pools.region_bytes
        if device.type == "cpu":
            self.memory = torch.from_numpy(allocate(num_bytes))
        else:
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            # A peer's writes do not wait for the queued zeroing, so finish it here.
            torch.cuda.synchronize(device)
        place = Device(device.type, device.index or 0)
        self.region = Region(self.memory.data_ptr(), num_bytes, place)

    def layer(self, group: str, tensor: str, layer: int) -> Tensor:
        """Return one layer: [pages, tokens, units, elements].

        The shape is the same in both orders; only the strides differ.
        """
        placement = self.pools.map.of(group, tensor)
        # Every layer is alike.
        units = len(self.layout.rank_shards(self.rank)[0].units)
        (kind,) = (t for t in self.layout.spec.group(group).tensors if t.name == tensor)
        (base,) = placement.bases_of((layer,))
        raw = self.memory[base.offset : base.offset + placement.num_pages * placement.page_stride]
        flat, tokens = raw.view(TORCH_DTYPES[kind.dtype]), self.layout.page_tokens
        if self.layout.order is Order.HND:
            return flat.view(placement.num_pages, units, tokens, kind.elements).transpose(1, 2)
        return flat.view(placement.num_pages, tokens, units, kind.elements)


def one_region(pools: Pools) -> Pools:
    """Return the same pools, one behind the other in a single region."""
    starts = [0]
    for num_bytes in pools.region_bytes:
        starts.append(starts[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)

    def moved(placement: Placement) -> Placement:
        bases = tuple(Base(b.layer, 0, starts[b.region] + b.offset) for b in placement.bases)
        return replace(placement, bases=bases)

    return Pools(PoolMap(tuple(map(moved, pools.map.placements))), (starts[-1],))
