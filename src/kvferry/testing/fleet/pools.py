"""Pools of one rank in a test: filled with the pattern of rooms, and compared with it."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group, StateRow, Tensor
from kvferry.layout.tokens import Tokens
from kvferry.memory.pools import Memory
from kvferry.plan.places import Placement, contiguous_pools
from kvferry.plan.plan import Request
from kvferry.regions import Device, Region

Bytes = NDArray[np.uint8]

BACKGROUND = 0xA5
# Pools from this size on are filled and compared by up to this many threads.
LARGE_BYTES, MOST_THREADS = 256 << 20, 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

T = TypeVar("T")


class _PoolLayer(NamedTuple):
    """One layer of one tensor that this rank holds."""

    group: Group
    tensor: Tensor
    shard: Shard
    layer: int
    view: Bytes  # [pages, tokens, units, bytes]; one token for state rows

    def describe(self, wrong: NDArray[np.bool_]) -> str:
        places = np.argwhere(wrong)
        at = tuple(int(i) for i in places[0])
        name = f"{self.group.name}.{self.tensor.name} layer {self.layer}"
        return f"{name}: {len(places)} wrong bytes, the first at {at}"


class RoomPages(NamedTuple):
    """The pages of a room, the same in every paged group, and its state row, if any."""

    pages: tuple[int, ...]
    row: int | None


class Content(NamedTuple):
    """The content of a room: the seed of its pattern, its pages, and the request."""

    seed: int
    where: RoomPages
    request: Request


class PlacedTokens(NamedTuple):
    """Where an engine keeps a request on one rank: the slots of its tokens, and its state row.

    A slot is a page times the tokens of a page, plus the place in it.
    """

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    row: int


class TestPools:
    """A rank's memory as ``[pages, tokens, units, bytes]``, whatever its strides."""

    __test__ = False

    def __init__(self, layout: Layout, rank: int, memory: Memory, arrays: list[Bytes]) -> None:
        self.layout = layout
        self._memory = memory
        self._arrays = arrays
        self._layers = list(self._views(layout.rank_shards(rank)))

    def _views(self, shards: tuple[Shard, ...]) -> Iterator[_PoolLayer]:
        for shard in shards:
            group = self.layout.spec.group(shard.group)
            for tensor in group.tensors:
                placement = self._memory.map.of(group.name, tensor.name)
                for layer in group.layers_in(shard.layers):
                    view = self._view(placement, group, tensor, shard, layer)
                    yield _PoolLayer(group, tensor, shard, layer, view)

    def _view(
        self, placement: Placement, group: Group, tensor: Tensor, shard: Shard, layer: int
    ) -> Bytes:
        (base,) = placement.bases_of((layer,))
        tokens = self.layout.page_entries(group)
        strides = (placement.page_stride, placement.token_stride, placement.unit_stride, 1)
        shape = (placement.num_pages, tokens, len(shard.units), tensor.unit_bytes)
        return as_strided(self._arrays[base.region][base.offset :], shape, strides)

    def clear(self) -> None:
        """Fill everything with the background."""
        for array in self._arrays:
            array[:] = BACKGROUND

    def fill(self, seed: int, where: RoomPages, tokens: range, *, states: bool) -> None:
        """Fill tokens of a room with its pattern, and its state row."""

        def compute(layer: _PoolLayer) -> None:
            if isinstance(layer.group.kind, StateRow):
                if states:
                    layer.view[where.row, 0] = self._state(seed, layer)[0]
                return
            mine = self._mine(layer, tokens)
            if len(mine):
                page, within = self._at(layer, mine, where)
                layer.view[page, within] = self._tokens(seed, layer, mine)

        list(self._in_each_layer(compute))

    def fill_placed(self, seed: int, where: PlacedTokens) -> None:
        """Fill the slots that an engine gives to tokens with a room's pattern."""
        for layer in self._layers:
            page, within, content = self._placed(seed, layer, where)
            layer.view[page, within] = content

    def placed_problem(self, seed: int, where: PlacedTokens) -> str | None:
        """Return what is wrong if the pools should have these slots and nothing else."""
        for layer in self._layers:
            expected = np.full(layer.view.shape, BACKGROUND, dtype=np.uint8)
            page, within, content = self._placed(seed, layer, where)
            expected[page, within] = content
            if (layer.view != expected).any():
                return layer.describe(layer.view != expected)
        return None

    def _placed(
        self, seed: int, layer: _PoolLayer, where: PlacedTokens
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Bytes]:
        if isinstance(layer.group.kind, StateRow):
            row = np.array([where.row], dtype=np.int64)
            return row, np.zeros(1, dtype=np.int64), self._state(seed, layer)
        page, within = np.divmod(
            np.array(where.slots, np.int64), self.layout.page_entries(layer.group)
        )
        return page, within, self._tokens(seed, layer, np.array(where.tokens, np.int64))

    def problem(self, rooms: Iterable[Content]) -> str | None:
        """Return what is wrong if the pools should have these rooms and nothing else."""
        wanted = list(rooms)

        def compare(layer: _PoolLayer) -> str | None:
            expected = np.full(layer.view.shape, BACKGROUND, dtype=np.uint8)
            for room in wanted:
                page, within = self._owed(layer, room)
                expected[page, within] = self._bytes(layer, room)
            wrong = layer.view != expected
            return layer.describe(wrong) if wrong.any() else None

        return next(filter(None, self._in_each_layer(compare)), None)

    def _in_each_layer(self, work: Callable[[_PoolLayer], T]) -> Iterator[T]:
        """Yield the result of each layer in order, with several threads if the pools are large."""
        if sum(array.nbytes for array in self._arrays) < LARGE_BYTES:
            yield from map(work, self._layers)
            return
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            yield from threads.map(work, self._layers)

    def room_problem(self, room: Content) -> str | None:
        """Return what is wrong with a room, ignoring all other pages."""
        for layer in self._layers:
            page, within = self._owed(layer, room)
            wrong = layer.view[page, within] != self._bytes(layer, room)
            if wrong.any():
                return layer.describe(wrong)
        return None

    def checksum(self, where: RoomPages) -> int:
        """Return a checksum of a room's pages and its row."""
        total = 0
        for layer in self._layers:
            total = zlib.crc32(layer.view[self._places(layer, where)].tobytes(), total)
        return total

    def clear_room(self, where: RoomPages) -> None:
        """Fill a room's pages and its row with the background."""
        for layer in self._layers:
            layer.view[self._places(layer, where)] = BACKGROUND

    def _places(self, layer: _PoolLayer, where: RoomPages) -> list[int]:
        if isinstance(layer.group.kind, StateRow):
            return [] if where.row is None else [where.row]
        return list(where.pages)

    def _owed(
        self, layer: _PoolLayer, room: Content
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pages, and the places in each, where bytes of the room must have arrived."""
        owed = self._owed_tokens(layer, room)
        if isinstance(layer.group.kind, StateRow):
            rows = np.full(len(owed), room.where.row, dtype=np.int64)
            return rows, np.zeros(len(owed), dtype=np.int64)
        return self._at(layer, owed, room.where)

    def _owed_tokens(self, layer: _PoolLayer, room: Content) -> NDArray[np.int64]:
        owed = layer.group.owed(room.request.num_tokens, room.request.prefix)
        return self._mine(layer, range(owed.first, owed.end))

    def _bytes(self, layer: _PoolLayer, room: Content) -> Bytes:
        owed = self._owed_tokens(layer, room)
        if isinstance(layer.group.kind, StateRow):
            return self._state(room.seed, layer)[: len(owed)]
        return self._tokens(room.seed, layer, owed)

    def _mine(self, layer: _PoolLayer, tokens: range) -> NDArray[np.int64]:
        held = held_positions(layer.shard.tokens, tokens.stop)
        return held[np.searchsorted(held, tokens.start) :]

    def _at(
        self, layer: _PoolLayer, tokens: NDArray[np.int64], where: RoomPages
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        last = int(tokens[-1]) + 1 if len(tokens) else 0
        local = np.searchsorted(held_positions(layer.shard.tokens, last), tokens)
        place, within = np.divmod(local, self.layout.page_entries(layer.group))
        return np.asarray(where.pages, dtype=np.int64)[place], within

    def _tokens(self, seed: int, layer: _PoolLayer, tokens: NDArray[np.int64]) -> Bytes:
        units = range(layer.shard.units.first, layer.shard.units.end)
        name = f"{layer.group.name}.{layer.tensor.name}"
        return pattern(seed, name, layer.layer, tokens, units, layer.tensor.unit_bytes)

    def _state(self, seed: int, layer: _PoolLayer) -> Bytes:
        return self._tokens(seed, layer, np.zeros(1, dtype=np.int64))


def held_positions(tokens: Tokens, end: int) -> NDArray[np.int64]:
    """Return the positions of a set below ``end``. The index of each is its local token."""
    positions = np.arange(tokens.first, end if tokens.end is None else min(end, tokens.end))
    residues = positions % tokens.pattern.period
    held = np.zeros(tokens.pattern.period, dtype=np.bool_)
    for run in tokens.pattern.runs:
        held[run.first : run.end] = True
    return np.asarray(positions[held[residues]], dtype=np.int64)


# ---------------------------------------------------------------- the pattern


def pattern(
    seed: int, tensor: str, layer: int, tokens: NDArray[np.int64], units: range, unit_bytes: int
) -> Bytes:
    """Return bytes that depend on where they belong, as ``[tokens, units, unit_bytes]``."""
    words = -(-unit_bytes // 8)
    token = tokens.astype(np.uint64)[:, None, None]
    unit = np.arange(units.start, units.stop, dtype=np.uint64)[None, :, None]
    word = np.arange(words, dtype=np.uint64)[None, None, :]
    name = np.uint64(zlib.crc32(f"{seed}/{tensor}/{layer}".encode()))
    mixed = _mix(_mix(token * np.uint64(4096) + unit) + (name << np.uint64(20)) + word)
    return mixed.view(np.uint8)[:, :, :unit_bytes]


def _mix(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash each value cheaply, so that neighbours differ."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = values * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


# ---------------------------------------------------------------- GPU memory


class Mirror:
    """Host arrays that mirror tensors on a GPU; without tensors the arrays are the pools."""

    def __init__(self, arrays: list[Bytes], tensors: Sequence[Any] = ()) -> None:
        self.arrays = arrays
        self._tensors = tensors

    def upload(self) -> None:
        """Copy the arrays to the GPU."""
        if not self._tensors:
            return
        import torch  # noqa: PLC0415 - only where there is a GPU

        for array, tensor in zip(self.arrays, self._tensors, strict=True):
            tensor.copy_(torch.from_numpy(array))
        torch.cuda.synchronize()

    def download(self) -> None:
        """Copy the GPU's tensors to the arrays."""
        for array, tensor in zip(self.arrays, self._tensors, strict=False):
            array[:] = tensor.cpu().numpy()


def allocate_on(
    device: Device, layout: Layout, rank: int, num_pages: int, num_rows: int
) -> tuple[Memory, Mirror]:
    """Allocate contiguous pools on a GPU."""
    import torch  # noqa: PLC0415

    pools = contiguous_pools(layout, rank, num_pages, num_rows)
    sizes = pools.region_bytes
    tensors = [torch.empty(size, dtype=torch.uint8, device=str(device)) for size in sizes]
    regions = tuple(Region(t.data_ptr(), t.numel(), device) for t in tensors)
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes]
    return Memory(pools.map, regions, tensors), Mirror(arrays, tensors)


def plain_copy_s(device: Device, num_bytes: int) -> float:
    """Return how long a plain copy of that many bytes takes on a warm GPU."""
    import torch  # noqa: PLC0415

    source, target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=str(device)) for _ in range(2)
    )
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - begin
