"""Pools on a device, with a copy of them on the host that a test can read and write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.layout.layout import Layout
from kvferry.memory.pools import Memory
from kvferry.plan.places import contiguous_pools
from kvferry.regions import Device, Region
from kvferry.testing.fleet.pattern import Bytes


class Mirror:
    """Host arrays, and what they mirror; host memory is its own mirror."""

    def __init__(self, arrays: list[Bytes], tensors: Sequence[Any] = ()) -> None:
        self.arrays = arrays
        self._tensors = tensors

    def upload(self) -> None:
        """Bring the device up to date."""
        if not self._tensors:
            return
        import torch  # noqa: PLC0415 - only where there is a device

        for array, tensor in zip(self.arrays, self._tensors, strict=True):
            tensor.copy_(torch.from_numpy(array))
        torch.cuda.synchronize()

    def download(self) -> None:
        """Bring the host up to date."""
        for array, tensor in zip(self.arrays, self._tensors, strict=False):
            array[:] = tensor.cpu().numpy()


def allocate_on(
    device: Device, layout: Layout, rank: int, num_pages: int, num_rows: int
) -> tuple[Memory, Mirror]:
    """Dense pools on a device."""
    import torch  # noqa: PLC0415

    pools = contiguous_pools(layout, rank, num_pages, num_rows)
    sizes = pools.region_bytes
    tensors = [torch.empty(size, dtype=torch.uint8, device=str(device)) for size in sizes]
    regions = tuple(Region(t.data_ptr(), t.numel(), device) for t in tensors)
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
    return Memory(pools.map, regions, tensors), Mirror(arrays, tensors)


def plain_copy_s(device: Device, num_bytes: int) -> float:
    """How long a plain copy of so many bytes takes on a device that is warm."""
    import torch  # noqa: PLC0415

    source, target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=str(device)) for _ in range(2)
    )
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - begin
