"""Calls to a GPU: uploads of tables, and launches of Triton kernels that read them.

They are queued on a stream without torch's bookkeeping, which takes longer than the rest of a call.
Only GPU hosts import this module.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kvferry.errors import TransportError
from kvferry.plan.places import Int64s

R = TypeVar("R")

# PyDLL keeps the GIL: the calls take microseconds, but getting the GIL back from a thread that
# computes can take milliseconds.
_driver = ctypes.PyDLL("libcuda.so.1")
_upload, _download = _driver.cuMemcpyHtoDAsync_v2, _driver.cuMemcpyDtoHAsync_v2
_upload.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_download.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

# Sizes of uploads in numbers: the smallest, and the factor to the next.
SMALLEST_UPLOAD, UPLOAD_GROWTH = 4096, 4
NUMBER_BYTES = 8

# Triton compiles on one thread at a time, and endpoints of one process start together.
_compiling = threading.Lock()


def on_device(device: torch.device, act: Callable[[], R]) -> R:
    """Call ``act`` with this device as the current one. Translate errors of the driver."""
    try:
        if torch.cuda.current_device() == device.index:
            return act()
        with torch.cuda.device(device):
            return act()
    except RuntimeError as error:
        raise TransportError(f"the GPU took no copy ({error}); restart this process") from error


class LoadedKernel:
    """A kernel for some constants, compiled and loaded for the current device.

    Its arguments are addresses, then numbers of 32 bits, then the constants.
    """

    def __init__(
        self,
        kernel: Any,
        *,
        num_pointers: int,
        num_numbers: int,
        constants: tuple[int, ...],
        num_warps: int,
    ) -> None:
        self._constants = constants
        arguments = (*[torch.int64] * num_pointers, *[1] * num_numbers, *constants)
        with _compiling:
            compiled = kernel.warmup(*arguments, grid=(1,), num_warps=num_warps)
            self._run = compiled.run
        # The function and its launch metadata, without profiler hooks: ``compiled[grid](...)``
        # would look all of it up at each launch.
        self._how = (compiled.function, compiled.packed_metadata, None, None, None)

    def start(self, num_programs: int, stream: int, *arguments: int) -> None:
        """Queue a launch."""
        self._run(num_programs, 1, 1, stream, *self._how, *arguments, *self._constants)


class Upload:
    """Pinned memory for a table, and the device memory to which it is uploaded."""

    def __init__(self, capacity: int, stream: torch.cuda.Stream) -> None:
        self.capacity = capacity
        pinned = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
        self.array: Int64s = pinned.numpy()
        # Allocated for this stream, so that it is not reused while a launch reads it.
        with torch.cuda.stream(stream):
            self._table = torch.empty(capacity, dtype=torch.int64, device=stream.device)
        self._from, self.address = pinned.data_ptr(), self._table.data_ptr()
        self.last_use: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        """Whether the last launch that reads it is done."""
        return self.last_use is None or self.last_use.query()

    def send(self, size: int, stream: int) -> None:
        """Queue the upload of the first ``size`` numbers."""
        # Not with torch, which would have to switch its current stream and back: that takes longer
        # than the rest of a call.
        status = _upload(self.address, self._from, size * NUMBER_BYTES, stream)
        if status:
            raise RuntimeError(f"CUDA driver error {status} at an upload")

    def fetch(self, first: int, end: int, stream: int) -> None:
        """Queue the download of the numbers from ``first`` to ``end``."""
        at, size = first * NUMBER_BYTES, (end - first) * NUMBER_BYTES
        status = _download(self._from + at, self.address + at, size, stream)
        if status:
            raise RuntimeError(f"CUDA driver error {status} at a download")


class Uploads:
    """The uploads of one stream, by size, the least recently used first."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._by_size: defaultdict[int, deque[Upload]] = defaultdict(deque)
        # The size that is being filled.
        self._next: deque[Upload] = deque()

    def next_array(self, size: int) -> Int64s:
        """Return pinned memory for the next table: of the oldest upload if free, or a new one."""
        capacity = SMALLEST_UPLOAD
        while capacity < size:
            capacity *= UPLOAD_GROWTH
        uploads = self._by_size[capacity]
        if not uploads or not uploads[0].free:
            uploads.appendleft(Upload(capacity, self._stream))
        self._next = uploads
        return uploads[0].array

    def take(self) -> Upload:
        """Return the upload whose memory ``next_array`` has returned. Give it back after use."""
        return self._next.popleft()

    def give_back(self, upload: Upload, last_use: torch.cuda.Event | None = None) -> None:
        """Let an upload be used again after an event; at once if the GPU has never read it."""
        if last_use is None:
            self._by_size[upload.capacity].appendleft(upload)
        else:
            upload.last_use = last_use
            self._by_size[upload.capacity].append(upload)
