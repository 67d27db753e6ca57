"""Copies in the memory of one GPU with a Triton kernel: gather, scatter and direct copies.

A call makes a table in pinned memory, and queues its upload and one launch over all layers, tensors
and jobs on a stream of the copier (several if parts need different tiles, or if the first job is
large). It never waits for the GPU. The caller keeps the memory behind the addresses alive until the
returned event is done. Only one thread may use a copier.

Only this module and ``gpu_kernels`` need torch, triton (3.3 or later) and a CUDA driver.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from kvferry.errors import InputError, TransportError
from kvferry.memory.copy.gpu_tables import (
    HEADER,
    TILES,
    AddressCache,
    CopyTable,
    GpuCopy,
    KernelLaunch,
    Tile,
    batches,
    can_move_sources,
    table_of,
)
from kvferry.plan.bind import Binding
from kvferry.plan.places import Int64s
from kvferry.regions import Device

try:
    import torch

    from kvferry.memory.copy.gpu_kernels import copy_tiles

    # PyDLL keeps the GIL: the call takes microseconds, but getting the GIL back from a thread that
    # computes can take milliseconds.
    _upload = ctypes.PyDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
except (ImportError, OSError) as error:
    raise InputError(
        f"copies on a GPU need torch, triton and a CUDA driver ({error}); install what is missing"
    ) from error

_compiling = threading.Lock()
_upload.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

__all__ = ["GpuCopier", "GpuCopy"]

R = TypeVar("R")

# Copies whose table is prepared ahead of the call.
MAX_PREBOUND = 32
# Sizes of uploads in numbers: the smallest, and the factor to the next.
SMALLEST_UPLOAD, UPLOAD_GROWTH = 4096, 4
NUMBER_BYTES = 8


class GpuCopier:
    """Copies bound pieces between addresses on one GPU.

    With ``yields``, a thread that waits for an event yields its core, and learns of the end some
    microseconds later.
    """

    def __init__(self, device: Device, *, yields: bool = False) -> None:
        if device.kind != "cuda" or not torch.cuda.is_available():
            raise InputError(f"the GPU copier needs a CUDA device that torch can see, not {device}")
        self._device = torch.device(device.kind, device.number)
        self._yields = yields
        self._stream = torch.cuda.Stream(self._device)
        self._addresses = AddressCache()
        self._kernels: dict[Tile, _Kernel] = {}
        # By size, the least recently used first. ``_next`` has the size that is being filled.
        self._uploads: defaultdict[int, deque[_Upload]] = defaultdict(deque)
        self._next: deque[_Upload] = deque()
        # By the identity of the binding, which the value keeps alive.
        self._prebound: OrderedDict[int, _PreboundCopy] = OrderedDict()
        # Pinned memory must not be freed while the GPU reads a table from it.
        weakref.finalize(self, self._stream.synchronize)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which copies are queued."""
        return self._stream

    def warm_up(self) -> None:
        """Compile and load every kernel, so that no request waits for it."""
        self._on_device(self._warm_up)

    def _warm_up(self) -> None:
        tiles = [tile for choices in TILES.values() for tile in choices]
        # A part without layers for each kernel, so that every kernel runs and copies nothing.
        launches = tuple(KernelLaunch(tile, i * HEADER, 1, 1, 1) for i, tile in enumerate(tiles))
        size = len(tiles) * HEADER
        table = CopyTable(launches, self._next_array(size)[:size])
        table.numbers[:] = 0
        table.numbers[::HEADER] = 1
        self._queue(table, self._next.popleft()).synchronize()

    def copy(
        self, jobs: Sequence[GpuCopy], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Queue the jobs as one copy that starts after ``after``. Return an event for its end.

        No job may write bytes that another job reads or writes.
        """
        return self._on_device(partial(self._copy, jobs, after))

    def _copy(self, jobs: Sequence[GpuCopy], after: torch.cuda.Event | None) -> torch.cuda.Event:
        if after is not None:
            self._stream.wait_event(after)
        prebound = self._take_prebound(jobs)
        if prebound is not None:
            return self._queue(prebound.table, prebound.upload)
        for batch in batches(jobs):
            done = self._queue(*self._make_table(batch))
        return done

    def prebind(self, job: GpuCopy) -> None:
        """Make the table of a job that may be copied soon. Its source address may still change.

        The table is not uploaded yet, because a GPU that several processes share would have to
        switch between them once more.
        """
        if id(job.binding) in self._prebound:
            return
        table, upload = self._on_device(partial(self._make_table, [job]))
        self._prebound[id(job.binding)] = _PreboundCopy(job, table, upload)
        if len(self._prebound) > MAX_PREBOUND:
            self._drop(self._prebound.popitem(last=False)[1])

    def _drop(self, prebound: _PreboundCopy) -> None:
        """Return the upload of a table that the GPU has never read."""
        self._uploads[prebound.upload.capacity].appendleft(prebound.upload)

    def _take_prebound(self, jobs: Sequence[GpuCopy]) -> _PreboundCopy | None:
        """Return the table that was made for a single job, adjusted to its source address."""
        found = [self._prebound.pop(id(job.binding), None) for job in jobs]
        prebound = [copy for copy in found if copy is not None]
        if len(jobs) == len(prebound) == 1 and can_move_sources(prebound[0].job, jobs[0]):
            (copy,), (job,) = prebound, jobs
            copy.table.move_sources(job.sources[0] - copy.job.sources[0])
            return copy
        for each in prebound:
            self._drop(each)
        return None

    def _on_device(self, act: Callable[[], R]) -> R:
        """Call ``act`` with this device as the current one. Translate errors of the driver."""
        try:
            if torch.cuda.current_device() == self._device.index:
                return act()
            with torch.cuda.device(self._device):
                return act()
        except RuntimeError as error:
            raise TransportError(f"the GPU took no copy ({error}); restart this process") from error

    def prepare(
        self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> PreparedCopy:
        """Upload the table of a copy, so that ``start`` only has to launch the kernel."""
        return self._on_device(partial(self._prepare, GpuCopy(binding, sources, targets)))

    def _prepare(self, job: GpuCopy) -> PreparedCopy:
        table, upload = self._make_table([job])
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return PreparedCopy(table.launches, upload)

    def start(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """Queue a prepared copy, once. Return an event for its end."""
        return self._on_device(partial(self._launch, prepared))

    def forget(self, prepared: PreparedCopy) -> None:
        """Release a prepared copy that will not be started."""
        self._on_device(partial(self._launch, PreparedCopy((), prepared.upload)))

    def drain(self) -> None:
        """Wait until all queued copies are done."""
        self._stream.synchronize()

    def _next_array(self, size: int) -> Int64s:
        """Return pinned memory for the next table: the oldest upload if free, or a new one."""
        capacity = SMALLEST_UPLOAD
        while capacity < size:
            capacity *= UPLOAD_GROWTH
        uploads = self._uploads[capacity]
        if not uploads or not uploads[0].free:
            uploads.appendleft(_Upload(capacity, self._stream))
        self._next = uploads
        return uploads[0].array

    def _make_table(self, jobs: Sequence[GpuCopy]) -> tuple[CopyTable, _Upload]:
        """Return the table of jobs, and the upload that holds it."""
        table = table_of(jobs, self._addresses, self._next_array)
        return table, self._next.popleft()

    def _queue(self, table: CopyTable, upload: _Upload) -> torch.cuda.Event:
        """Queue the upload and the launches of a table."""
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return self._launch(PreparedCopy(table.launches, upload))

    def _launch(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """Queue the launches. The upload is free again when the returned event is done."""
        upload, stream = prepared.upload, self._stream.cuda_stream
        for launch in prepared.launches:
            kernel = self._kernels.get(launch.tile) or self._compile(launch.tile)
            kernel.start(launch, upload.address, stream)
        done = torch.cuda.Event(blocking=self._yields)
        done.record(self._stream)
        upload.last_use = done
        self._uploads[upload.capacity].append(upload)
        return done

    def _compile(self, tile: Tile) -> _Kernel:
        # Triton compiles on one thread at a time, and copiers of one process start together.
        with _compiling:
            kernel = self._kernels[tile] = _Kernel(tile)
        return kernel


class _PreboundCopy(NamedTuple):
    """A copy whose table is made but not uploaded."""

    job: GpuCopy
    table: CopyTable
    upload: _Upload


class PreparedCopy(NamedTuple):
    """A copy whose table is uploaded, or queued for upload."""

    launches: tuple[KernelLaunch, ...]
    upload: _Upload


class _Kernel:
    """The kernel for one tile, compiled and loaded for the current device."""

    def __init__(self, tile: Tile) -> None:
        *self._constants, num_warps, _ = tile
        pointer, number = torch.int64, 1
        compiled = copy_tiles.warmup(
            pointer, pointer, number, number, *self._constants, grid=(1,), num_warps=num_warps
        )
        self._run = compiled.run
        # The function and its launch metadata, without profiler hooks: ``compiled[grid](...)``
        # would look all of it up at each launch.
        self._how = (compiled.function, compiled.packed_metadata, None, None, None)

    def start(self, launch: KernelLaunch, table: int, stream: int) -> None:
        """Queue a launch for the table at this address."""
        _, first, num_parts, num_programs, depth = launch
        headers = table + first * NUMBER_BYTES
        arguments = (headers, table, num_parts, depth, *self._constants)
        self._run(num_programs, 1, 1, stream, *self._how, *arguments)


class _Upload:
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
