"""Maps other processes' GPU memory into this one. Every span is mapped once and reference-counted.

Sizes in a peer's metadata are not trusted. After opening a handle, the driver is asked for the
size of its memory, and less than the metadata says is refused. ``bounds`` keeps writes inside
regions, and the metadata check keeps regions inside spans.
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
from kvferry.transports.cuda.pidfd import PidFd


class Exporter(NamedTuple):
    """The process that exported a span: PID, start time, secret.

    The process has the secret in a file, under the descriptor ``proof``. So a peer cannot name
    another process's memory unless that process has given it the secret.
    """

    pid: int
    began: int
    secret: bytes
    proof: int


class _MappedAllocation(NamedTuple):
    """A span in this process's address space."""

    address: int
    unmap: Callable[[], None]


# A process can open a handle only once, so all its transports share the mappings.
_Key = tuple[int, Exporter, Span]
_lock = threading.Lock()
_open: dict[_Key, tuple[_MappedAllocation, int]] = {}


class MappedSpan:
    """A peer's span, mapped for one local GPU until ``close``."""

    def __init__(self, gpu: Gpu, exporter: Exporter, span: Span) -> None:
        self._key: _Key | None = (gpu.number, exporter, span)
        self._gpu = gpu
        with _lock:
            mapped, count = _open.get(self._key) or (_map(gpu, exporter, span), 0)
            _open[self._key] = mapped, count + 1
        self.address = mapped.address

    def close(self) -> None:
        """Unmap it if this was the last user. Nothing may be writing to it. Idempotent."""
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
                return _open_ipc(span)
            with PidFd(exporter.pid, exporter.began) as process:
                demand_proof(process, exporter)
                return _map_pieces(gpu, process, span)
    except DriverError as error:
        raise TransportError(
            f"cannot map the peer's GPU memory ({error}); its process has ended, runs as "
            f"another user, or has namespaces of its own (docker run --ipc and --pid)"
        ) from error


def _open_ipc(span: IpcSpan) -> _MappedAllocation:
    handle = driver().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), span.handle, HANDLE_BYTES)
    lazily = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = int(call("cuIpcOpenMemHandle", handle, int(lazily)))
    base, num_bytes = address_range(address)
    if base != address or num_bytes < span.num_bytes:
        call("cuIpcCloseMemHandle", address)
        raise TransportError(
            "the peer's GPU memory is smaller than its metadata says; restart the peer"
        )
    return _MappedAllocation(address, lambda: call("cuIpcCloseMemHandle", address))


def _map_pieces(gpu: Gpu, process: PidFd, span: VmmSpan) -> _MappedAllocation:
    """Map the pieces of a span one after another into one reserved address range."""
    total = span.num_bytes
    with ExitStack() as undo:
        address = int(call("cuMemAddressReserve", total, 0, 0, 0))
        undo.callback(call, "cuMemAddressFree", address, total)
        at = address
        for num_bytes, descriptor in zip(span.sizes, span.descriptors, strict=True):
            # The driver refuses to map more of a piece than exists.
            _map_piece(process, descriptor, at, num_bytes)
            undo.callback(call, "cuMemUnmap", at, num_bytes)
            at += num_bytes
        call("cuMemSetAccess", address, total, [_writable_by(gpu)], 1)
        _demand_sizes(address, span.sizes)
        return _MappedAllocation(address, undo.pop_all().close)


def demand_proof(process: PidFd, exporter: Exporter) -> None:
    """Raise ``TransportError`` unless the process holds the secret from the peer's metadata."""
    fetched = process.fetch(exporter.proof)
    try:
        # Reading from anything but a file could block.
        is_file = stat.S_ISREG(os.fstat(fetched).st_mode)
        if is_file and os.pread(fetched, len(exporter.secret), 0) == exporter.secret:
            return
    except OSError:  # Treated as a wrong secret.
        pass
    finally:
        os.close(fetched)
    raise TransportError(
        f"the process {exporter.pid} is not the peer that gives it as its own; restart the peer"
    )


def _demand_sizes(address: int, sizes: Sequence[int]) -> None:
    """Check each piece's size. The driver reports sizes only of accessible memory."""
    for num_bytes in sizes:
        if address_range(address) != (address, num_bytes):
            raise TransportError(
                "a piece of the peer's GPU memory is smaller than its metadata says; "
                "restart the peer"
            )
        address += num_bytes


def _map_piece(process: PidFd, descriptor: int, at: int, num_bytes: int) -> None:
    fetched = process.fetch(descriptor)
    try:
        kind = driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemImportFromShareableHandle", fetched, kind)
    finally:
        os.close(fetched)
    try:
        call("cuMemMap", at, num_bytes, 0, handle, 0)
    finally:
        # The mapping keeps the memory alive.
        call("cuMemRelease", handle)


def _writable_by(gpu: Gpu) -> object:
    access = driver().CUmemAccessDesc()
    access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.number
    access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
