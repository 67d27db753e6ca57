"""Exports a target's GPU memory: handles of whole allocations, and the regions' places in them.

Memory from ``cudaMalloc``, which torch's allocator uses, is exported as a CUDA IPC handle. Memory
from ``cuMemCreate``, which torch's expandable segments use, is exported as file descriptors, one
per physical allocation, which peers duplicate out of this process. Before that, a peer checks that
the process is the one that sent the metadata: it has a file with a secret that only its peers
know.

torch puts many pools into one allocation, and an expandable segment consists of many allocations.
So the unit of export is a span: a range of addresses that a peer maps as a range of its own.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.regions import Region
from kvferry.transports.cuda.driver import DriverError, Gpu, address_range, call, driver
from kvferry.transports.metadata import MAX_REGIONS

HANDLE_BYTES = 64
MAX_PIECES = 1 << 20
# File descriptors that are left for other uses.
_SPARE_DESCRIPTORS = 64

Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class IpcSpan(msgspec.Struct, frozen=True, array_like=True, tag="ipc"):
    """One allocation, as a CUDA IPC handle."""

    num_bytes: Size
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class VmmSpan(msgspec.Struct, frozen=True, array_like=True, tag="vmm"):
    """Consecutive physical allocations: the size and the file descriptor of each."""

    sizes: Annotated[tuple[Size, ...], Meta(max_length=MAX_PIECES)]
    descriptors: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_PIECES)
    ]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.descriptors):
            raise ValueError("every piece has a size and a file descriptor")

    @property
    def num_bytes(self) -> int:
        """Size of the whole span."""
        return sum(self.sizes)


Span = IpcSpan | VmmSpan


class SpanPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region as a part of a span, which is given by its index."""

    span: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    offset: Size
    num_bytes: Size

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.num_bytes


# ---------------------------------------------------------------- layout of allocations


class Allocation(NamedTuple):
    """Addresses that one handle covers. ``joins``: may form a span with the next allocation."""

    address: int
    num_bytes: int
    joins: bool

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.address + self.num_bytes


class ExportLayout(NamedTuple):
    """The allocations of every span, and every region's place in them."""

    spans: list[list[Allocation]]
    places: list[SpanPlace]


def lay_out(regions: Sequence[Region], allocation_at: Callable[[int], Allocation]) -> ExportLayout:
    """Find the allocations under the regions, and join adjacent ones to spans."""
    spans: list[list[Allocation]] = []
    for allocation in sorted(_allocations_under(regions, allocation_at)):
        last = spans[-1][-1] if spans else None
        if last and last.joins and allocation.joins and last.end == allocation.address:
            spans[-1].append(allocation)
        else:
            spans.append([allocation])
    return ExportLayout(spans, [_place(region, spans) for region in regions])


def _allocations_under(
    regions: Sequence[Region], allocation_at: Callable[[int], Allocation]
) -> set[Allocation]:
    found: set[Allocation] = set()
    for region in regions:
        at = region.address
        while at < region.end:
            allocation = allocation_at(at)
            found.add(allocation)
            at = allocation.end
    return found


def _place(region: Region, spans: list[list[Allocation]]) -> SpanPlace:
    if not region.num_bytes:
        return SpanPlace(0, 0, 0)
    for index, span in enumerate(spans):
        if span[0].address <= region.address and region.end <= span[-1].end:
            return SpanPlace(index, region.address - span[0].address, region.num_bytes)
    raise TransportError(
        f"a pool of {region.num_bytes} bytes lies in several allocations; allocate it as one"
    )


# ---------------------------------------------------------------- handles


class ExportedMemory:
    """Handles of the memory under some regions, open until ``close``.

    ``proof`` is the descriptor of the file that holds the secret.
    """

    def __init__(self, gpu: Gpu, regions: Sequence[Region], secret: bytes) -> None:
        self._creator = os.getpid()
        self.proof = _file_with(secret)
        self._descriptors = [self.proof]
        try:
            self._export(gpu, regions)
        except TransportError:
            self.close()
            raise

    def _export(self, gpu: Gpu, regions: Sequence[Region]) -> None:
        with gpu.current():
            layout = lay_out(regions, _allocation_at)
            self.places = tuple(layout.places)
            # For connections within this process, which cannot open its own handles.
            self.addresses = [span[0].address for span in layout.spans]
            _demand_descriptors(sum(one.joins for span in layout.spans for one in span))
            self.spans = tuple(self._export_span(span) for span in layout.spans)

    def _export_span(self, span: list[Allocation]) -> Span:
        if not span[0].joins:
            (allocation,) = span
            return IpcSpan(allocation.num_bytes, _ipc_handle(allocation.address))
        descriptors = []
        for allocation in span:
            descriptors.append(_descriptor(allocation.address))
            self._descriptors.append(descriptors[-1])
        return VmmSpan(tuple(allocation.num_bytes for allocation in span), tuple(descriptors))

    def close(self) -> None:
        """Close the descriptors, so that no more peers can map them. Existing mappings stay."""
        # A forked child has copies of the descriptors, but the parent's object is not its own.
        if os.getpid() == self._creator:
            for descriptor in self._descriptors:
                with suppress(OSError):
                    os.close(descriptor)
        self._descriptors = []


def _file_with(secret: bytes) -> int:
    """Return the descriptor of an anonymous file in memory."""
    try:
        descriptor = os.memfd_create("kvferry")
        os.write(descriptor, secret)
    except OSError as error:
        raise TransportError(
            f"cannot open a file ({error.strerror}); raise the limit of open files (ulimit -n)"
        ) from error
    return descriptor


def _allocation_at(address: int) -> Allocation:
    try:
        base, num_bytes = address_range(address)
    except DriverError as error:
        raise TransportError(
            f"a pool is not in GPU memory ({error}); use shm or nixl for host memory"
        ) from error
    return Allocation(base, num_bytes, joins=not _has_ipc_handle(base))


def _has_ipc_handle(base: int) -> bool:
    try:
        call("cuIpcGetMemHandle", base)
    except DriverError:
        return False
    return True


def _ipc_handle(base: int) -> bytes:
    return ctypes.string_at(call("cuIpcGetMemHandle", base).getPtr(), HANDLE_BYTES)


def _descriptor(base: int) -> int:
    """Return a file descriptor for the physical allocation at that address."""
    try:
        handle = call("cuMemRetainAllocationHandle", base)
    except DriverError as error:
        raise TransportError(
            f"a pool's memory cannot be shared with other processes ({error}): it is managed "
            f"memory, or from cudaMallocAsync; let torch use its own allocator "
            f"(PYTORCH_CUDA_ALLOC_CONF=backend:native), or use nixl"
        ) from error
    kinds = driver().CUmemAllocationHandleType
    try:
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        descriptor = int(call("cuMemExportToShareableHandle", handle, kind, 0))
    except DriverError as error:
        raise TransportError(
            f"a pool's memory was not allocated for export as a file descriptor ({error}); "
            f"let torch make it without expandable segments "
            f"(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), or use nixl"
        ) from error
    finally:
        call("cuMemRelease", handle)
    os.set_inheritable(descriptor, False)
    return descriptor


def _demand_descriptors(num_more: int) -> None:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not num_more or most == resource.RLIM_INFINITY:
        return
    needed = len(os.listdir("/proc/self/fd")) + num_more + _SPARE_DESCRIPTORS
    if needed > most:
        raise TransportError(
            f"the pools consist of {num_more} pieces of torch's expandable segments, and each "
            f"takes a file descriptor; this process may have {most}: raise that "
            f"(ulimit -n {needed}), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
