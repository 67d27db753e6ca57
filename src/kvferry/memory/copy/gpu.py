"""Copies in the memory of one GPU with a Triton kernel: gather, scatter and direct copies.

A call makes a table in pinned memory, and queues its upload and one launch over all layers, tensors
and jobs on a stream of the copier (several if parts need different tiles, or if the first job is
large). It never waits for the GPU. The caller keeps the memory behind the addresses alive until the
returned event is done. Only one thread may use a copier.

Only this module and ``gpu_kernels`` need torch, triton (3.3 or later) and a CUDA driver.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvferry.errors import InputError
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
from kvferry.regions import Device

try:
    import torch

    from kvferry.memory.copy.gpu_kernels import copy_tiles
    from kvferry.memory.gpu_calls import NUMBER_BYTES, LoadedKernel, Upload, Uploads, on_device
except (ImportError, OSError) as error:
    raise InputError(
        f"copies on a GPU need torch, triton and a CUDA driver ({error}); install what is missing"
    ) from error

__all__ = ["GpuCopier", "GpuCopy"]

# Copies whose table is prepared ahead of the call.
MAX_PREBOUND = 32


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
        self._kernels: dict[Tile, LoadedKernel] = {}
        self._uploads = Uploads(self._stream)
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
        on_device(self._device, self._warm_up)

    def _warm_up(self) -> None:
        tiles = [tile for choices in TILES.values() for tile in choices]
        # A part without layers for each kernel, so that every kernel runs and copies nothing.
        launches = tuple(KernelLaunch(tile, i * HEADER, 1, 1, 1) for i, tile in enumerate(tiles))
        size = len(tiles) * HEADER
        table = CopyTable(launches, self._uploads.next_array(size)[:size])
        table.numbers[:] = 0
        table.numbers[::HEADER] = 1
        self._queue(table, self._uploads.take()).synchronize()

    def copy(
        self, jobs: Sequence[GpuCopy], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Queue the jobs as one copy that starts after ``after``. Return an event for its end.

        No job may write bytes that another job reads or writes.
        """
        return on_device(self._device, partial(self._copy, jobs, after))

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
        table, upload = on_device(self._device, partial(self._make_table, [job]))
        self._prebound[id(job.binding)] = _PreboundCopy(job, table, upload)
        if len(self._prebound) > MAX_PREBOUND:
            self._drop(self._prebound.popitem(last=False)[1])

    def _drop(self, prebound: _PreboundCopy) -> None:
        """Return the upload of a table that the GPU has never read."""
        self._uploads.give_back(prebound.upload)

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

    def prepare(
        self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> PreparedCopy:
        """Upload the table of a copy, so that ``start`` only has to launch the kernel."""
        return on_device(self._device, partial(self._prepare, GpuCopy(binding, sources, targets)))

    def _prepare(self, job: GpuCopy) -> PreparedCopy:
        table, upload = self._make_table([job])
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return PreparedCopy(table.launches, upload)

    def start(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """Queue a prepared copy, once. Return an event for its end."""
        return on_device(self._device, partial(self._launch, prepared))

    def forget(self, prepared: PreparedCopy) -> None:
        """Release a prepared copy that will not be started."""
        on_device(self._device, partial(self._launch, PreparedCopy((), prepared.upload)))

    def drain(self) -> None:
        """Wait until all queued copies are done."""
        self._stream.synchronize()

    def _make_table(self, jobs: Sequence[GpuCopy]) -> tuple[CopyTable, Upload]:
        """Return the table of jobs, and the upload that holds it."""
        table = table_of(jobs, self._addresses, self._uploads.next_array)
        return table, self._uploads.take()

    def _queue(self, table: CopyTable, upload: Upload) -> torch.cuda.Event:
        """Queue the upload and the launches of a table."""
        upload.send(len(table.numbers), self._stream.cuda_stream)
        return self._launch(PreparedCopy(table.launches, upload))

    def _launch(self, prepared: PreparedCopy) -> torch.cuda.Event:
        """Queue the launches. The upload is free again when the returned event is done."""
        upload, stream = prepared.upload, self._stream.cuda_stream
        table = upload.address
        for tile, first, num_parts, num_programs, depth in prepared.launches:
            kernel = self._kernels.get(tile) or self._load(tile)
            headers = table + first * NUMBER_BYTES
            kernel.start(num_programs, stream, headers, table, num_parts, depth)
        done = torch.cuda.Event(blocking=self._yields)
        done.record(self._stream)
        self._uploads.give_back(upload, done)
        return done

    def _load(self, tile: Tile) -> LoadedKernel:
        *constants, num_warps, _ = tile
        kernel = self._kernels[tile] = LoadedKernel(
            copy_tiles,
            num_pointers=2,
            num_numbers=2,
            constants=tuple(constants),
            num_warps=num_warps,
        )
        return kernel


class _PreboundCopy(NamedTuple):
    """A copy whose table is made but not uploaded."""

    job: GpuCopy
    table: CopyTable
    upload: Upload


class PreparedCopy(NamedTuple):
    """A copy whose table is uploaded, or queued for upload."""

    launches: tuple[KernelLaunch, ...]
    upload: Upload
