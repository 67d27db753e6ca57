"""Selects how sums of cells are computed on a device, without importing torch and triton early."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from kvferry.layout.spec import CacheSpec
from kvferry.memory.checksum.cpu import CellSums
from kvferry.memory.checksum.gpu_tables import tiles_of
from kvferry.memory.pools import Memory
from kvferry.plan.content import CellEntries


class SumsInSteps(Protocol):
    """The sums of chosen cells, computed step by step."""

    def step(self) -> bool:
        """Add some content. Return False if there is no more."""

    @property
    def result(self) -> bytes:
        """The sums as little-endian words, once all content was added."""


# From a seed, a number of cells and their entries.
SumCells = Callable[[int, int, Iterable[CellEntries]], SumsInSteps]


def sums_in(memory: Memory, spec: CacheSpec) -> SumCells:
    """Return how to sum cells in a rank's memory. On a GPU, their kernels are compiled now."""
    addresses = tuple(region.address for region in memory.regions)
    if memory.device.is_host:
        return partial(CellSums, addresses=addresses)
    from kvferry.memory.checksum.gpu import GpuSummer  # noqa: PLC0415 - needs torch and triton

    summer = GpuSummer(memory.device, addresses, tiles_of(memory.map, spec, addresses))
    summer.warm_up()
    return summer.sum_cells
