"""Converts bindings into NIXL's descriptors, rows of (address, length, device), in batches.

A NIXL descriptor list cannot mix host and GPU memory, so a binding is cut where the type of memory
changes. Submitting a batch blocks the calling thread: for the copy if NIXL copies with the CPU, and
for some microseconds a descriptor if a GPU or a NIC does. So a binding is also cut such that no
batch blocks the thread for more than a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Binding, Descriptors
from kvferry.plan.cost import NIXL_DESCRIPTOR_BYTES
from kvferry.plan.places import Int64s
from kvferry.regions import Device, Region
from kvferry.transports.bounds import RegionBounds
from kvferry.transports.single_descriptor import SingleDescriptor

Table = NDArray[np.uint64]
# One descriptor: address, length, device number.
Row = tuple[int, int, int]

# About 5 ms of copying, from host to host memory.
_BATCH_BYTES = 32 << 20
# About 4 ms of submitting, from or to a GPU, whatever the size of the descriptors.
_GPU_BATCH = 512
_BOTH_ON_HOST = 3
# Up to this many pieces, a Python loop is faster than numpy.
_FEW_PIECES = 32


class DescriptorBatch(NamedTuple):
    """One NIXL transfer. ``single`` is set if it consists of a single piece."""

    source: Table | list[Row]
    target: Table | list[Row]
    source_type: str
    target_type: str
    single: SingleDescriptor | None = None

    def make_handle(self, agent: Any, peer: str) -> Any:
        """Return a transfer handle, which submits nothing."""
        return agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(self.source, self.source_type),
            agent.get_xfer_descs(self.target, self.target_type),
            peer,
        )


class NixlMemory:
    """The regions of one side, with columns that are indexed by region number."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self.sizes = tuple(region.num_bytes for region in regions)
        self.bounds = RegionBounds(self.sizes)
        self.types = tuple(memory_type(region.device) for region in regions)
        self._addresses = np.array([region.address for region in regions], dtype=np.uint64)
        self._devices = np.array([region.device.number for region in regions], dtype=np.uint64)
        self.on_host = np.array([region.device.is_host for region in regions], dtype=bool)

    @property
    def is_host(self) -> bool:
        """Whether no region is on a GPU."""
        return bool(self.on_host.all())

    def table(self, region: Int64s, offset: Int64s, length: Int64s) -> Table:
        """Return the descriptors of many pieces."""
        columns = (
            self._addresses[region] + offset.astype(np.uint64),
            length.astype(np.uint64),
            self._devices[region],
        )
        return np.stack(columns, axis=1)

    def row(self, region: int, offset: int, length: int) -> Row:
        """Return the descriptor of one piece."""
        base = self.regions[region]
        return base.address + offset, length, base.device.number


def memory_type(device: Device) -> str:
    """Return NIXL's name for the memory of a device."""
    return _type_name(device.is_host)


def _type_name(on_host: bool) -> str:
    return "DRAM" if on_host else "VRAM"


def single_batch(
    piece: SingleDescriptor, source: NixlMemory, target: NixlMemory
) -> DescriptorBatch:
    """Return the batch of one piece, which is not empty and inside the regions.

    Its handle is usually cached, and then the descriptors are not used.
    """
    ours = source.row(piece.source_region, piece.source_offset, piece.length)
    theirs = target.row(piece.target_region, piece.target_offset, piece.length)
    types = source.types[piece.source_region], target.types[piece.target_region]
    return DescriptorBatch([ours], [theirs], *types, piece)


def small_batch(
    binding: Binding, source: NixlMemory, target: NixlMemory
) -> list[DescriptorBatch] | None:
    """Return what ``make_batches`` returns for a small binding, four times as fast.

    None if the binding has many pieces or several types of memory. It is inside the regions.
    """
    size = binding.size
    if size.num_pieces > _FEW_PIECES or size.num_bytes > _BATCH_BYTES // 2:
        return None
    types: set[tuple[str, str]] = set()
    ours, theirs = [], []
    for part in binding.merged().parts:
        columns = [column.tolist() for column in part.pieces.expand()]
        for base, target_base in zip(part.source_bases, part.target_bases, strict=True):
            types.add((source.types[base.region], target.types[target_base.region]))
            for read_at, write_at, length in zip(*columns, strict=True):
                if length:
                    ours.append(source.row(base.region, base.offset + read_at, length))
                    written = target_base.offset + write_at
                    theirs.append(target.row(target_base.region, written, length))
    if len(types) != 1 or not ours:
        return None
    return [DescriptorBatch(np.array(ours, np.uint64), np.array(theirs, np.uint64), *types.pop())]


def make_batches(binding: Binding, source: NixlMemory, target: NixlMemory) -> list[DescriptorBatch]:
    """Return batches with as few descriptors as possible. The binding is inside the regions."""
    pieces = binding.merged().descriptors()
    pieces = _select(pieces, pieces.length > 0)
    if not len(pieces.length):
        return []
    types = 2 * source.on_host[pieces.source_region] + target.on_host[pieces.target_region]
    if types.min() != types.max():
        order = np.argsort(types, kind="stable")
        types, pieces = types[order], _select(pieces, order)
    ours = source.table(pieces.source_region, pieces.source_offset, pieces.length)
    theirs = target.table(pieces.target_region, pieces.target_offset, pieces.length)
    costs = batch_costs(pieces.length, np.ones_like(types), types == _BOTH_ON_HOST)
    return [
        DescriptorBatch(
            ours[first:end],
            theirs[first:end],
            _type_name(bool(types[first] & 2)),
            _type_name(bool(types[first] & 1)),
        )
        for first, end in batch_ranges(costs, types)
    ]


def batch_costs(
    lengths: Int64s | int, descriptors: NDArray[Any], on_host: NDArray[np.bool_] | bool
) -> Int64s:
    """Return what each piece takes of a batch, in bytes that the CPU copies meanwhile.

    ``descriptors`` is 1 for a piece that begins a descriptor, and 0 for one that NIXL merges with
    the piece before it. ``on_host``: both sides are in host memory.
    """
    copied = lengths + descriptors * NIXL_DESCRIPTOR_BYTES
    costs: Int64s = np.where(on_host, copied, descriptors * (_BATCH_BYTES // _GPU_BATCH))
    return costs


def fits_one_batch(num_descriptors: int, num_bytes: int, *, on_host: bool) -> bool:
    """Return whether all pieces fit into one batch."""
    if on_host:
        return num_bytes + num_descriptors * NIXL_DESCRIPTOR_BYTES <= _BATCH_BYTES
    return num_descriptors <= _GPU_BATCH


def batch_ranges(costs: Int64s, types: Int64s | None = None) -> list[tuple[int, int]]:
    """Return where batches begin and end: where the type changes, and where they are full."""
    changes = np.diff(np.cumsum(costs) // _BATCH_BYTES)
    if types is not None:
        changes |= np.diff(types)
    cuts = (np.flatnonzero(changes) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(costs)], strict=True))


def _select(pieces: Descriptors, which: NDArray[np.bool_] | NDArray[np.intp]) -> Descriptors:
    return Descriptors(*(column[which] for column in pieces))
