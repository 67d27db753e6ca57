"""Other processes' GPU memory in ours: what was exported, opened once and counted.

Nothing that a peer says about sizes is believed. After a handle has been opened the driver
is asked how large its memory is, and less than was said is refused; writes are then held
inside the regions by ``bounds``, and the regions inside what was mapped here.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvferry.errors import TransportError
from kvferry.transports.cuda.driver import DriverError, Gpu, address_range, call, driver
from kvferry.transports.cuda.exports import HANDLE_BYTES, IpcSpan, Span, VmmSpan
from kvferry.transports.descriptors import DescriptorHolder


class Exporter(NamedTuple):
    """The process that a span is of: its number, when it began, and its secret.

    It has the secret in a file, under the descriptor ``proof``. So a peer can't name another
    process's memory unless that process has told it of it.
    """

    pid: int
    began: int
    secret: bytes
    proof: int


class _MappedAllocation(NamedTuple):
    """A span in our address space."""

    address: int
    unmap: Callable[[], None]


# A handle that is open can't be opened again, so all transports of the process share these.
_Key = tuple[int, Exporter, Span]
_lock = threading.Lock()
_open: dict[_Key, tuple[_MappedAllocation, int]] = {}


class MappedSpan:
    """A peer's span, mapped for one of our GPUs until ``close``."""

    def __init__(self, gpu: Gpu, exporter: Exporter, span: Span) -> None:
        self._key: _Key | None = (gpu.number, exporter, span)
        self._gpu = gpu
        with _lock:
            mapped, count = _open.get(self._key) or (_map(gpu, exporter, span), 0)
            _open[self._key] = mapped, count + 1
        self.address = mapped.address

    def close(self) -> None:
        """Unmap it, if nobody else here uses it. Nothing may be writing to it. Idempotent."""
        key, self._key = self._key, None
        if key is None:
            return
        with _lock:
            mapped, count = _open[key]
            if count > 1:
                _open[key] = mapped, count - 1
                return
            del _open[key]
            with self._gpu.current():
                mapped.unmap()


def _map(gpu: Gpu, exporter: Exporter, span: Span) -> _MappedAllocation:
    try:
        with gpu.current():
            if isinstance(span, IpcSpan):
                return _opened(span)
            with DescriptorHolder(exporter.pid, exporter.began) as holder:
                demand_proof(holder, exporter)
                return _assembled(gpu, holder, span)
    except DriverError as error:
        raise TransportError(
            f"the peer's GPU memory can't be mapped ({error}); its process has ended, runs as "
            f"another user, or has name spaces of its own (docker run --ipc and --pid)"
        ) from error


def _opened(span: IpcSpan) -> _MappedAllocation:
    handle = driver().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), span.handle, HANDLE_BYTES)
    lazily = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = int(call("cuIpcOpenMemHandle", handle, int(lazily)))
    base, num_bytes = address_range(address)
    if base != address or num_bytes < span.num_bytes:
        call("cuIpcCloseMemHandle", address)
        raise TransportError("the peer's GPU memory is smaller than it says")
    return _MappedAllocation(address, lambda: call("cuIpcCloseMemHandle", address))


def _assembled(gpu: Gpu, holder: DescriptorHolder, span: VmmSpan) -> _MappedAllocation:
    """Pieces one after another in a stretch of addresses of our own."""
    total = span.num_bytes
    with ExitStack() as undo:
        address = int(call("cuMemAddressReserve", total, 0, 0, 0))
        undo.callback(call, "cuMemAddressFree", address, total)
        at = address
        for num_bytes, descriptor in zip(span.sizes, span.descriptors, strict=True):
            # The driver maps no more of a piece than there is.
            _map_piece(holder, descriptor, at, num_bytes)
            undo.callback(call, "cuMemUnmap", at, num_bytes)
            at += num_bytes
        call("cuMemSetAccess", address, total, [_writable_by(gpu)], 1)
        _demand_sizes(address, span.sizes)
        return _MappedAllocation(address, undo.pop_all().close)


def demand_proof(holder: DescriptorHolder, exporter: Exporter) -> None:
    """The process has the secret that the peer gave."""
    fetched = holder.fetch(exporter.proof)
    try:
        # A read of anything but a file could wait.
        is_file = stat.S_ISREG(os.fstat(fetched).st_mode)
        if is_file and os.pread(fetched, len(exporter.secret), 0) == exporter.secret:
            return
    except OSError:  # As good as another secret.
        pass
    finally:
        os.close(fetched)
    raise TransportError(f"the process {exporter.pid} is not the peer that gives it as its own")


def _demand_sizes(address: int, sizes: Sequence[int]) -> None:
    """Each piece is as large as was said. The driver tells only of memory that can be used."""
    for num_bytes in sizes:
        if address_range(address) != (address, num_bytes):
            raise TransportError("a piece of the peer's GPU memory is smaller than it says")
        address += num_bytes


def _map_piece(holder: DescriptorHolder, descriptor: int, at: int, num_bytes: int) -> None:
    fetched = holder.fetch(descriptor)
    try:
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemImportFromShareableHandle", fetched, kind)
    finally:
        os.close(fetched)
    try:
        call("cuMemMap", at, num_bytes, 0, handle, 0)
    finally:
        # What is mapped keeps the memory.
        call("cuMemRelease", handle)


def _writable_by(gpu: Gpu) -> object:
    access = driver().CUmemAccessDesc()
    access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.number
    access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
