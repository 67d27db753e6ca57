"""Bindings as NIXL wants them: arrays of (address, length, device), cut into batches.

Memory of different kinds can't share a descriptor list, and posting costs its thread
the time of the copy where NIXL copies itself. A binding is therefore cut where the
kind changes, and so that no batch keeps the thread for more than a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Binding, Descriptors
from kvferry.plan.places import Int64s
from kvferry.regions import Device, Region
from kvferry.transport.single import Single

Table = NDArray[np.uint64]

# A descriptor takes as long as so many bytes: 3 µs, where 6 GB/s are copied.
_DESCRIPTOR_BYTES = 16 << 10
# What one batch may take: about 5 ms.
_BATCH_BYTES = 32 << 20


class Batch(NamedTuple):
    """One transfer: where it reads, where it writes, and NIXL's names for the memory there."""

    source: Table
    target: Table
    source_kind: str
    target_kind: str


class Memory:
    """Regions of one side as columns, to be looked up by region number."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self.sizes = tuple(region.num_bytes for region in regions)
        self._addresses = np.array([region.address for region in regions], dtype=np.uint64)
        self._numbers = np.array([region.device.number for region in regions], dtype=np.uint64)
        self._on_host = np.array([region.device.is_host for region in regions], dtype=bool)

    def on_host(self, region: Int64s) -> NDArray[np.bool_]:
        """Whether each is memory of the CPU."""
        return self._on_host[region]

    def table(self, region: Int64s, offset: Int64s, length: Int64s) -> Table:
        """NIXL's descriptors."""
        columns = (
            self._addresses[region] + offset.astype(np.uint64),
            length.astype(np.uint64),
            self._numbers[region],
        )
        return np.stack(columns, axis=1)

    def row(self, region: int, offset: int, length: int) -> Table:
        """NIXL's descriptor of a single piece."""
        base = self.regions[region]
        return np.array([[base.address + offset, length, base.device.number]], dtype=np.uint64)


def kind(device: Device) -> str:
    """NIXL's name for memory there."""
    return _kind(device.is_host)


def _kind(on_host: bool) -> str:
    return "DRAM" if on_host else "VRAM"


def batch_of(piece: Single, source: Memory, target: Memory) -> Batch:
    """One piece, which is not empty and lies inside the regions."""
    return Batch(
        source.row(piece.source_region, piece.source_offset, piece.length),
        target.row(piece.target_region, piece.target_offset, piece.length),
        kind(source.regions[piece.source_region].device),
        kind(target.regions[piece.target_region].device),
    )


def batches(binding: Binding, source: Memory, target: Memory) -> list[Batch]:
    """The binding's bytes, in as few descriptors as they allow. It lies inside the regions."""
    named = binding.merged().descriptors()
    named = _rows(named, named.length > 0)
    if not len(named.length):
        return []
    kinds = 2 * source.on_host(named.source_region) + target.on_host(named.target_region)
    if kinds.min() != kinds.max():
        order = np.argsort(kinds, kind="stable")
        kinds, named = kinds[order], _rows(named, order)
    ours = source.table(named.source_region, named.source_offset, named.length)
    theirs = target.table(named.target_region, named.target_offset, named.length)
    cost = np.cumsum(named.length + _DESCRIPTOR_BYTES)
    cuts = np.flatnonzero(np.diff(cost // _BATCH_BYTES) | np.diff(kinds)) + 1
    return [
        Batch(
            ours[first:end],
            theirs[first:end],
            _kind(bool(kinds[first] & 2)),
            _kind(bool(kinds[first] & 1)),
        )
        for first, end in zip([0, *cuts], [*cuts, len(kinds)], strict=True)
    ]


def _rows(named: Descriptors, which: NDArray[np.bool_] | NDArray[np.intp]) -> Descriptors:
    return Descriptors(*(column[which] for column in named))
