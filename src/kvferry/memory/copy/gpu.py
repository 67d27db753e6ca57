"""Gather, scatter and direct copies in one GPU's memory: the shell around one Triton kernel.

A call makes a table in pinned memory and queues its upload and one launch over all layers,
tensors and jobs (more where parts need different tiles, or where the first job is large) on
a stream of its own. It never waits for the GPU. Whoever calls keeps the memory behind the
addresses alive until the event says that the copy is done. One thread owns a copier.

Importing this module needs torch, triton (3.3 or later) and a CUDA driver; nothing else in
``copy`` does.
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
    AddressBook,
    CopyTable,
    GpuCopy,
    KernelLaunch,
    Tile,
    batches,
    may_move,
    table_of,
)
from kvferry.plan.bind import Binding
from kvferry.plan.places import Int64s
from kvferry.regions import Device

try:
    import torch

    from kvferry.memory.copy.gpu_kernels import copy_tiles

    # One that keeps Python's lock: the call takes microseconds, and getting the lock back from a
    # thread that computes can take milliseconds.
    _upload = ctypes.PyDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
except (ImportError, OSError) as error:
    raise InputError(
        f"copies on a GPU need torch, triton and a CUDA driver ({error}); install what is missing"
    ) from error

_compiling = threading.Lock()
_upload.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

__all__ = ["GpuCopier", "GpuCopy"]

R = TypeVar("R")

# Copies whose table is kept, made and not sent, until they come.
MAX_DRAFTS = 32
# Uploads hold so many numbers, or by this factor more, so that few sizes serve every table.
SMALLEST_UPLOAD, UPLOAD_GROWTH = 4096, 4
NUMBER_BYTES = 8


class GpuCopier:
    """Copies bound pieces from addresses to addresses on one GPU.

    ``yields``: whoever waits for one of its events gives the core to others meanwhile,
    and hears of the end some microseconds later.
    """

    def __init__(self, device: Device, *, yields: bool = False) -> None:
        if device.kind != "cuda" or not torch.cuda.is_available():
            raise InputError(f"the GPU copier needs a CUDA device that torch can see, not {device}")
        self._device = torch.device(device.kind, device.number)
        self._yields = yields
        self._stream = torch.cuda.Stream(self._device)
        self._book = AddressBook()
        self._kernels: dict[Tile, _Kernel] = {}
        # By size, the least recently used first; and those of the size that is being filled.
        self._uploads: defaultdict[int, deque[_Upload]] = defaultdict(deque)
        self._next: deque[_Upload] = deque()
        # By the identity of the binding, which each keeps from being another's.
        self._drafts: OrderedDict[int, _CopyDraft] = OrderedDict()
        # Nobody else may get the pinned memory while the GPU still reads a table from it.
        weakref.finalize(self, self._stream.synchronize)

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where its copies are queued."""
        return self._stream

    def warm_up(self) -> None:
        """Compile and load every kernel, so that no request waits for it."""
        self._on_device(self._warm_up)

    def _warm_up(self) -> None:
        tiles = [tile for choices in TILES.values() for tile in choices]
        # A part for each, of one tile in none of its layers: every kernel runs and does nothing.
        launches = tuple(KernelLaunch(tile, i * HEADER, 1, 1, 1) for i, tile in enumerate(tiles))
        size = len(tiles) * HEADER
        table = CopyTable(launches, self._room(size)[:size])
        table.numbers[:] = 0
        table.numbers[::HEADER] = 1
        self._queue(table, self._next.popleft()).synchronize()

    def copy(
        self, jobs: Sequence[GpuCopy], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Queue the jobs as one copy that starts after ``after``; the event tells its end.

        No job may write what another of them reads or writes.
        """
        return self._on_device(partial(self._copy, jobs, after))

    def _copy(self, jobs: Sequence[GpuCopy], after: torch.cuda.Event | None) -> torch.cuda.Event:
        if after is not None:
            self._stream.wait_event(after)
        draft = self._drafted(jobs)
        if draft is not None:
            return self._queue(draft.table, draft.upload)
        for batch in batches(jobs):
            done = self._queue(*self._made(batch))
        return done

    def prebind(self, job: GpuCopy) -> None:
        """This may be copied soon, by itself: have its table made. What it reads may lie elsewhere.

        The GPU hears nothing of it: a GPU that other processes use would have to change between
        them once more.
        """
        if id(job.binding) in self._drafts:
            return
        made = self._on_device(partial(self._made, [job]))
        self._drafts[id(job.binding)] = _CopyDraft(job, *made)
        if len(self._drafts) > MAX_DRAFTS:
            self._drop(self._drafts.popitem(last=False)[1])

    def _drop(self, draft: _CopyDraft) -> None:
        """The GPU has never read its memory."""
        self._uploads[draft.upload.capacity].appendleft(draft.upload)

    def _drafted(self, jobs: Sequence[GpuCopy]) -> _CopyDraft | None:
        """The table that was made for a job, with its sources where they are now."""
        found = [self._drafts.pop(id(job.binding), None) for job in jobs]
        drafts = [draft for draft in found if draft is not None]
        if len(jobs) == len(drafts) == 1 and may_move(drafts[0].job, jobs[0]):
            (draft,), (job,) = drafts, jobs
            draft.table.move_sources(job.sources[0] - draft.job.sources[0])
            return draft
        for each in drafts:
            self._drop(each)
        return None

    def _on_device(self, act: Callable[[], R]) -> R:
        """Do this with our device as the current one. What the driver says against it is told."""
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
        """Have the table of a copy on the GPU, so that starting it is a launch and no more."""
        return self._on_device(partial(self._prepare, GpuCopy(binding, sources, targets)))

    def _prepare(self, job: GpuCopy) -> PreparedCopy:
        table, upload = self._made([job])
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return PreparedCopy(table.launches, upload)

    def start(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """Queue a copy that was prepared, once; the event tells its end."""
        return self._on_device(partial(self._launch, prepared))

    def forget(self, prepared: PreparedCopy) -> None:
        """It will not be started."""
        self._on_device(partial(self._launch, PreparedCopy((), prepared.upload)))

    def drain(self) -> None:
        """Wait until nothing that was queued still runs."""
        self._stream.synchronize()

    def _room(self, size: int) -> Int64s:
        """Pinned memory for the next table: the oldest that nothing reads any more, or new."""
        capacity = SMALLEST_UPLOAD
        while capacity < size:
            capacity *= UPLOAD_GROWTH
        uploads = self._uploads[capacity]
        if not uploads or not uploads[0].free:
            uploads.appendleft(_Upload(capacity, self._stream))
        self._next = uploads
        return uploads[0].array

    def _made(self, jobs: Sequence[GpuCopy]) -> tuple[CopyTable, _Upload]:
        """The jobs' table, and where it is."""
        table = table_of(jobs, self._book, self._room)
        return table, self._next.popleft()

    def _queue(self, table: CopyTable, upload: _Upload) -> torch.cuda.Event:
        """Queue what a table says."""
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return self._launch(PreparedCopy(table.launches, upload))

    def _launch(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """The upload is free again when the event has come, which is behind its sending too."""
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
        # Triton compiles for one thread at a time; copiers of one process begin together.
        with _compiling:
            kernel = self._kernels[tile] = _Kernel(tile)
        return kernel


class _CopyDraft(NamedTuple):
    """A copy whose table is made, and not sent."""

    job: GpuCopy
    table: CopyTable
    upload: _Upload


class PreparedCopy(NamedTuple):
    """A copy whose table is on the GPU, or on its way."""

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
        # The function, how it is launched, and no hooks of profilers: ``compiled[grid](...)``
        # would look all of it up again each time.
        self._how = (compiled.function, compiled.packed_metadata, None, None, None)

    def start(self, launch: KernelLaunch, table: int, stream: int) -> None:
        """Queue a launch that works through the table at that address."""
        _, first, num_parts, num_programs, depth = launch
        headers = table + first * NUMBER_BYTES
        arguments = (headers, table, num_parts, depth, *self._constants)
        self._run(num_programs, 1, 1, stream, *self._how, *arguments)


class _Upload:
    """Pinned memory for a table, and the device memory that it is sent to."""

    def __init__(self, capacity: int, stream: torch.cuda.Stream) -> None:
        self.capacity = capacity
        pinned = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
        self.array: Int64s = pinned.numpy()
        # Allocated for that stream, so that it is not given to another while a launch reads it.
        with torch.cuda.stream(stream):
            self._table = torch.empty(capacity, dtype=torch.int64, device=stream.device)
        self._from, self.address = pinned.data_ptr(), self._table.data_ptr()
        self.last_use: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        """Whether the launch that read it is over."""
        return self.last_use is None or self.last_use.query()

    def send(self, size: int, stream: int) -> None:
        """Queue the upload of so many numbers."""
        # torch would have to change its current stream and change it back, which takes longer
        # than everything else in a call.
        status = _upload(self.address, self._from, size * NUMBER_BYTES, stream)
        if status:
            raise RuntimeError(f"CUDA driver error {status} at an upload")
