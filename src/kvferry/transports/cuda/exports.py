"""What a target lets its peers map: whole allocations, and where its regions lie in them.

An allocation of ``cudaMalloc``, and so of torch's allocator, is told by a CUDA IPC handle;
that of ``cuMemCreate``, which torch's expandable segments are made of, by file descriptors,
one for each physical piece, which peers take out of this process. They look first whether it
is the one that told them so: it has a file with a secret that only its peers know.

Torch puts many pools into one allocation, and an expandable segment consists of many; hence
``spans``: stretches of addresses of which a peer makes stretches of its own.
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

HANDLE_BYTES = 64
MAX_REGIONS = 1 << 16
MAX_PIECES = 1 << 20
# Descriptors that are left to others.
_SPARE_DESCRIPTORS = 64

Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class IpcSpan(msgspec.Struct, frozen=True, array_like=True, tag="ipc"):
    """One allocation by its CUDA IPC handle."""

    num_bytes: Size
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class VmmSpan(msgspec.Struct, frozen=True, array_like=True, tag="vmm"):
    """Physical pieces one after another: the bytes of each, and its file descriptor."""

    sizes: Annotated[tuple[Size, ...], Meta(max_length=MAX_PIECES)]
    descriptors: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_PIECES)
    ]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.descriptors):
            raise ValueError("every piece has a size and a file descriptor")

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.sizes)


Span = IpcSpan | VmmSpan


class SpanPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region: which span, and where in it."""

    span: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    offset: Size
    num_bytes: Size

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.num_bytes


# ---------------------------------------------------------------- where things lie


class Backing(NamedTuple):
    """Addresses that one handle stands for. ``joins``: the next may belong to the same span."""

    address: int
    num_bytes: int
    joins: bool

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.address + self.num_bytes


class Arrangement(NamedTuple):
    """The backings of every span, and every region's place in them."""

    spans: list[list[Backing]]
    places: list[SpanPlace]


def lay_out(regions: Sequence[Region], backing_at: Callable[[int], Backing]) -> Arrangement:
    """Find the backings under the regions, and join those that follow each other."""
    spans: list[list[Backing]] = []
    for backing in sorted(_under(regions, backing_at)):
        last = spans[-1][-1] if spans else None
        if last and last.joins and backing.joins and last.end == backing.address:
            spans[-1].append(backing)
        else:
            spans.append([backing])
    return Arrangement(spans, [_place(region, spans) for region in regions])


def _under(regions: Sequence[Region], backing_at: Callable[[int], Backing]) -> set[Backing]:
    found: set[Backing] = set()
    for region in regions:
        at = region.address
        while at < region.end:
            backing = backing_at(at)
            found.add(backing)
            at = backing.end
    return found


def _place(region: Region, spans: list[list[Backing]]) -> SpanPlace:
    if not region.num_bytes:
        return SpanPlace(0, 0, 0)
    for index, span in enumerate(spans):
        if span[0].address <= region.address and region.end <= span[-1].end:
            return SpanPlace(index, region.address - span[0].address, region.num_bytes)
    raise TransportError(
        f"a pool of {region.num_bytes} bytes lies in several allocations; allocate it at once"
    )


# ---------------------------------------------------------------- handles


class Exports:
    """Handles for the memory under some regions, kept open until ``close``.

    ``proof`` is the descriptor of a file that holds the secret.
    """

    def __init__(self, gpu: Gpu, regions: Sequence[Region], secret: bytes) -> None:
        self._maker = os.getpid()
        self.proof = _file_with(secret)
        self._descriptors = [self.proof]
        try:
            self._export(gpu, regions)
        except TransportError:
            self.close()
            raise

    def _export(self, gpu: Gpu, regions: Sequence[Region]) -> None:
        with gpu.current():
            arranged = lay_out(regions, _backing_at)
            self.places = tuple(arranged.places)
            # By which the process itself, where handles can't be opened, finds the memory.
            self.addresses = [span[0].address for span in arranged.spans]
            _demand_descriptors(sum(backing.joins for span in arranged.spans for backing in span))
            self.spans = tuple(self._exported(span) for span in arranged.spans)

    def _exported(self, span: list[Backing]) -> Span:
        if not span[0].joins:
            (backing,) = span
            return IpcSpan(backing.num_bytes, _ipc_handle(backing.address))
        descriptors = []
        for backing in span:
            descriptors.append(_descriptor(backing.address))
            self._descriptors.append(descriptors[-1])
        return VmmSpan(tuple(backing.num_bytes for backing in span), tuple(descriptors))

    def close(self) -> None:
        """Nobody can map the memory any more; who has it mapped keeps it."""
        # A forked child has the same numbers, but they are not its own to close.
        if os.getpid() == self._maker:
            for descriptor in self._descriptors:
                with suppress(OSError):
                    os.close(descriptor)
        self._descriptors = []


def _file_with(secret: bytes) -> int:
    """The descriptor of a file in memory that nobody else can find."""
    try:
        descriptor = os.memfd_create("kvferry")
        os.write(descriptor, secret)
    except OSError as error:
        raise TransportError(
            f"no file can be opened ({error.strerror}); look at ulimit -n"
        ) from error
    return descriptor


def _backing_at(address: int) -> Backing:
    try:
        base, num_bytes = address_range(address)
    except DriverError as error:
        raise TransportError(f"a pool is not in a GPU's memory ({error})") from error
    return Backing(base, num_bytes, joins=not _has_ipc_handle(base))


def _has_ipc_handle(base: int) -> bool:
    try:
        call("cuIpcGetMemHandle", base)
    except DriverError:
        return False
    return True


def _ipc_handle(base: int) -> bytes:
    return ctypes.string_at(call("cuIpcGetMemHandle", base).getPtr(), HANDLE_BYTES)


def _descriptor(base: int) -> int:
    """A file descriptor for the physical piece at that address."""
    try:
        handle = call("cuMemRetainAllocationHandle", base)
    except DriverError as error:
        raise TransportError(
            f"a pool's memory can't be shared with other processes ({error}): it is managed "
            f"memory, or of cudaMallocAsync; let torch use its own allocator "
            f"(PYTORCH_CUDA_ALLOC_CONF=backend:native), or use nixl"
        ) from error
    kinds = driver().CUmemAllocationHandleType
    try:
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        descriptor = int(call("cuMemExportToShareableHandle", handle, kind, 0))
    except DriverError as error:
        raise TransportError(
            f"a pool's memory was made so that file descriptors can't stand for it ({error}); "
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
            f"the pools lie in {num_more} pieces of torch's expandable segments, and each takes "
            f"a file descriptor; this process may have {most}: raise that (ulimit -n {needed}), "
            f"or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
