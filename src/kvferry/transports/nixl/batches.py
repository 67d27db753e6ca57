"""Bindings as NIXL wants them: arrays of (address, length, device), cut into batches.

NixlMemory of different kinds can't share a descriptor list, and posting costs its thread
the time of the copy where NIXL copies itself. A binding is therefore cut where the
kind changes, and so that no batch keeps the thread for more than a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Binding, Descriptors
from kvferry.plan.cost import NIXL_DESCRIPTOR_BYTES
from kvferry.plan.places import Int64s
from kvferry.regions import Device, Region
from kvferry.transports.bounds import Limits
from kvferry.transports.single_descriptor import Single

Table = NDArray[np.uint64]
# One descriptor: an address, a length, and a device's number.
Row = tuple[int, int, int]

# What one batch may take: about 5 ms.
_BATCH_BYTES = 32 << 20
# So many pieces are described one by one in less time than arrays take to begin with.
_FEW = 32


class DescriptorBatch(NamedTuple):
    """One transfer: where it reads, where it writes, and NIXL's names for the memory there.

    ``piece`` is all of it, where it is a single one.
    """

    source: Table | list[Row]
    target: Table | list[Row]
    source_kind: str
    target_kind: str
    piece: Single | None = None


class NixlMemory:
    """Regions of one side as columns, to be looked up by region number."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self.sizes = tuple(region.num_bytes for region in regions)
        self.limits = Limits(self.sizes)
        self.kinds = tuple(kind(region.device) for region in regions)
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

    def row(self, region: int, offset: int, length: int) -> Row:
        """NIXL's descriptor of a single piece."""
        base = self.regions[region]
        return base.address + offset, length, base.device.number


def kind(device: Device) -> str:
    """NIXL's name for memory there."""
    return _kind(device.is_host)


def _kind(on_host: bool) -> str:
    return "DRAM" if on_host else "VRAM"


def batch_of(piece: Single, source: NixlMemory, target: NixlMemory) -> DescriptorBatch:
    """One piece, which is not empty and lies inside the regions."""
    ours = source.row(piece.source_region, piece.source_offset, piece.length)
    theirs = target.row(piece.target_region, piece.target_offset, piece.length)
    kinds = source.kinds[piece.source_region], target.kinds[piece.target_region]
    # Mostly it has been NIXL's before, and nobody looks at this.
    return DescriptorBatch([ours], [theirs], *kinds, piece)


def few_pieces(
    binding: Binding, source: NixlMemory, target: NixlMemory
) -> list[DescriptorBatch] | None:
    """What ``batches`` gives for a few pieces of one kind of memory, in a quarter of the time.

    None if they are more than a few, or of several kinds. The binding lies inside the regions.
    """
    size = binding.size
    if size.num_pieces > _FEW or size.num_bytes > _BATCH_BYTES // 2:
        return None
    kinds: set[tuple[str, str]] = set()
    ours, theirs = [], []
    for part in binding.merged().parts:
        offsets = [column.tolist() for column in part.pieces.expand()]
        for from_, into in zip(part.source_bases, part.target_bases, strict=True):
            kinds.add((source.kinds[from_.region], target.kinds[into.region]))
            for begin, end, length in zip(*offsets, strict=True):
                if length:
                    ours.append(source.row(from_.region, from_.offset + begin, length))
                    theirs.append(target.row(into.region, into.offset + end, length))
    if len(kinds) != 1 or not ours:
        return None
    return [DescriptorBatch(np.array(ours, np.uint64), np.array(theirs, np.uint64), *kinds.pop())]


def batches(binding: Binding, source: NixlMemory, target: NixlMemory) -> list[DescriptorBatch]:
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
    cost = np.cumsum(named.length + NIXL_DESCRIPTOR_BYTES)
    cuts = np.flatnonzero(np.diff(cost // _BATCH_BYTES) | np.diff(kinds)) + 1
    return [
        DescriptorBatch(
            ours[first:end],
            theirs[first:end],
            _kind(bool(kinds[first] & 2)),
            _kind(bool(kinds[first] & 1)),
        )
        for first, end in zip([0, *cuts], [*cuts, len(kinds)], strict=True)
    ]


def _rows(named: Descriptors, which: NDArray[np.bool_] | NDArray[np.intp]) -> Descriptors:
    return Descriptors(*(column[which] for column in named))
