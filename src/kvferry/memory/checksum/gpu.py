"""Sums of the cells of a room in the memory of one GPU.

They are queued step by step on a stream of their own, so that copies and the engine's kernels run
in between. No call waits for the GPU. The caller keeps the memory behind the addresses alive until
the last event is done. Only one thread may use a summer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from kvferry.errors import InputError
from kvferry.memory.checksum.gpu_tables import NUM_KEYS, NUM_WARPS, SumTile, Tiles, joined, table_of
from kvferry.plan.content import CellEntries, chunk_keys
from kvferry.regions import Device

try:
    import torch

    from kvferry.memory.checksum.gpu_kernels import sum_chunks
    from kvferry.memory.gpu_calls import LoadedKernel, Upload, Uploads, on_device
except (ImportError, OSError) as error:
    raise InputError(
        f"sums on a GPU need torch, triton and a CUDA driver ({error}); install what is missing"
    ) from error

# Content per step: some 50 µs, so that a copy waits no longer. Launches per step: each takes the
# calling thread some 0.1 ms.
STEP_BYTES, STEP_LAUNCHES = 128 << 20, 4


class GpuSummer:
    """Sums cells in regions of one GPU, which begin at ``addresses``."""

    def __init__(self, device: Device, addresses: tuple[int, ...], tiles: Tiles) -> None:
        if device.kind != "cuda" or not torch.cuda.is_available():
            raise InputError(f"a GPU's sums need a CUDA device that torch can see, not {device}")
        self.device = torch.device(device.kind, device.number)
        self.addresses, self.tiles = addresses, tiles
        self.stream = torch.cuda.Stream(self.device)
        self.uploads = Uploads(self.stream)
        self._kernels: dict[SumTile, LoadedKernel] = {}
        # Pinned memory must not be freed while the GPU reads a table from it.
        weakref.finalize(self, self.stream.synchronize)

    def warm_up(self) -> None:
        """Compile and load the kernels, so that no request waits for it."""
        for tile in self.tiles.values():
            on_device(self.device, partial(self.kernel, tile))

    def kernel(self, tile: SumTile) -> LoadedKernel:
        """Return the kernel for a tile."""
        known = self._kernels.get(tile)
        if known is None:
            known = self._kernels[tile] = LoadedKernel(
                sum_chunks, num_pointers=2, num_numbers=1, constants=tile, num_warps=NUM_WARPS
            )
        return known

    def sum_cells(self, seed: int, num_cells: int, entries: Iterable[CellEntries]) -> GpuCellSums:
        """Return the sums of chosen cells, of which nothing is queued yet."""
        return GpuCellSums(self, seed, num_cells, entries)


class GpuCellSums:
    """The sums of chosen cells. Iterating over ``entries`` may raise ``InputError``.

    ``event`` is the end of the step that was queued last.
    """

    def __init__(
        self, summer: GpuSummer, seed: int, num_cells: int, entries: Iterable[CellEntries]
    ) -> None:
        self._summer = summer
        self._end = NUM_KEYS + num_cells
        numbers = on_device(summer.device, lambda: summer.uploads.next_array(self._end))
        numbers[:NUM_KEYS] = chunk_keys(seed).view(np.int64)
        numbers[NUM_KEYS : self._end] = 0
        # Has the keys, and behind them the sums.
        self._state = summer.uploads.take()
        self._launches = self._queued(entries)
        # Uploads of tables that the step to come reads last.
        self._read: list[Upload] = []
        self.event = torch.cuda.Event()

    def step(self) -> bool:
        """Queue some content. Return False if there is no more: the result then follows."""
        return on_device(self._summer.device, self._step)

    def _step(self) -> bool:
        total = 0
        more = True
        for _ in range(STEP_LAUNCHES):
            queued = next(self._launches, None)
            more = queued is not None
            total += queued or 0
            if not more or total >= STEP_BYTES:
                break
        if not more:
            self._state.fetch(NUM_KEYS, self._end, self._summer.stream.cuda_stream)
        self.event = torch.cuda.Event()
        self.event.record(self._summer.stream)
        while self._read:
            self._summer.uploads.give_back(self._read.pop(), self.event)
        return more

    def _queued(self, entries: Iterable[CellEntries]) -> Iterator[int]:
        """Queue launches, each when asked for, and yield the bytes of each."""
        summer, stream = self._summer, self._summer.stream.cuda_stream
        self._state.send(self._end, stream)
        for tile, parts in joined(entries, summer.tiles):
            table = table_of(tile, parts, summer.addresses, summer.uploads.next_array)
            upload = summer.uploads.take()
            upload.send(len(table.numbers), stream)
            kernel = summer.kernel(table.tile)
            at_once = max(1, STEP_BYTES // max(1, table.item_bytes))
            for first in range(0, table.num_items, at_once):
                num_items = min(at_once, table.num_items - first)
                num_programs = num_items * table.num_programs
                kernel.start(num_programs, stream, upload.address, self._state.address, first)
                yield num_items * table.item_bytes
            self._read.append(upload)

    @property
    def result(self) -> bytes:
        """The sums as little-endian words, once, when the last event is done."""
        result = self._state.array[NUM_KEYS : self._end].astype("<i8").tobytes()
        self._summer.uploads.give_back(self._state, self.event)
        return result

    def drain(self) -> None:
        """Wait until nothing that was queued runs."""
        self._summer.stream.synchronize()
