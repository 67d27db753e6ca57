"""One rank's pools in a test: filled with a room's pattern, and compared with it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvferry.layout.layout import Layout, Shard
from kvferry.layout.spec import Group, StateRow, Tensor
from kvferry.memory.pools import Memory
from kvferry.plan.places import Placement
from kvferry.plan.plan import Request
from kvferry.testing.fleet.pattern import Bytes, pattern

BACKGROUND = 0xA5
# Pools of that size are worked on by as many threads at most.
LARGE_BYTES, MOST_THREADS = 256 << 20, 8

T = TypeVar("T")


class _Layer(NamedTuple):
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
    """Where a room is kept: pages of groups that follow tokens, and its state row, if any."""

    pages: tuple[int, ...]
    row: int | None


class Content(NamedTuple):
    """A room that has arrived: what was computed, where it is, and how much of it came."""

    seed: int
    where: RoomPages
    request: Request


class TestPools:
    """A rank's memory as ``[pages, tokens, units, bytes]``, whatever its strides."""

    __test__ = False

    def __init__(self, layout: Layout, rank: int, memory: Memory, arrays: list[Bytes]) -> None:
        self.layout = layout
        self._memory = memory
        self._arrays = arrays
        self._layers = list(self._views(layout.rank_shards(rank)))

    def _views(self, shards: tuple[Shard, ...]) -> Iterator[_Layer]:
        for shard in shards:
            group = self.layout.spec.group(shard.group)
            for tensor in group.tensors:
                placement = self._memory.map.of(group.name, tensor.name)
                for layer in group.layers_in(shard.layers):
                    view = self._view(placement, group, tensor, shard, layer)
                    yield _Layer(group, tensor, shard, layer, view)

    def _view(
        self, placement: Placement, group: Group, tensor: Tensor, shard: Shard, layer: int
    ) -> Bytes:
        (base,) = placement.bases_of((layer,))
        tokens = 1 if isinstance(group.kind, StateRow) else self.layout.page_tokens
        strides = (placement.page_stride, placement.token_stride, placement.unit_stride, 1)
        shape = (placement.num_pages, tokens, len(shard.units), tensor.unit_bytes)
        return as_strided(self._arrays[base.region][base.offset :], shape, strides)

    def clear(self) -> None:
        """Make everything background."""
        for array in self._arrays:
            array[:] = BACKGROUND

    def fill(self, seed: int, where: RoomPages, tokens: range, *, states: bool) -> None:
        """Compute tokens of a room, and its state row."""

        def compute(layer: _Layer) -> None:
            if isinstance(layer.group.kind, StateRow):
                if states:
                    layer.view[where.row, 0] = self._state(seed, layer)[0]
                return
            mine = self._mine(layer, tokens)
            if len(mine):
                page, within = self._at(layer, mine, where)
                layer.view[page, within] = self._tokens(seed, layer, mine)

        list(self._in_each_layer(compute))

    def problem(self, rooms: Iterable[Content]) -> str | None:
        """What is wrong if these rooms should be here, and nothing else."""
        wanted = list(rooms)

        def compare(layer: _Layer) -> str | None:
            expected = np.full(layer.view.shape, BACKGROUND, dtype=np.uint8)
            for room in wanted:
                page, within = self._owed(layer, room)
                expected[page, within] = self._bytes(layer, room)
            wrong = layer.view != expected
            return layer.describe(wrong) if wrong.any() else None

        return next(filter(None, self._in_each_layer(compare)), None)

    def _in_each_layer(self, work: Callable[[_Layer], T]) -> Iterator[T]:
        """What comes of it in each layer, in order; by several threads where it takes long."""
        if sum(array.nbytes for array in self._arrays) < LARGE_BYTES:
            yield from map(work, self._layers)
            return
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            yield from threads.map(work, self._layers)

    def room_problem(self, room: Content) -> str | None:
        """What is wrong with a room, whatever is in other pages."""
        for layer in self._layers:
            page, within = self._owed(layer, room)
            wrong = layer.view[page, within] != self._bytes(layer, room)
            if wrong.any():
                return layer.describe(wrong)
        return None

    def checksum(self, where: RoomPages) -> int:
        """Of everything in a room's pages and its row."""
        total = 0
        for layer in self._layers:
            total = zlib.crc32(layer.view[self._places(layer, where)].tobytes(), total)
        return total

    def clear_room(self, where: RoomPages) -> None:
        """Make a room's pages and its row background."""
        for layer in self._layers:
            layer.view[self._places(layer, where)] = BACKGROUND

    def _places(self, layer: _Layer, where: RoomPages) -> list[int]:
        if isinstance(layer.group.kind, StateRow):
            return [] if where.row is None else [where.row]
        return list(where.pages)

    def _owed(self, layer: _Layer, room: Content) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in a layer the room's bytes must have arrived."""
        owed = self._owed_tokens(layer, room)
        if isinstance(layer.group.kind, StateRow):
            rows = np.full(len(owed), room.where.row, dtype=np.int64)
            return rows, np.zeros(len(owed), dtype=np.int64)
        return self._at(layer, owed, room.where)

    def _owed_tokens(self, layer: _Layer, room: Content) -> NDArray[np.int64]:
        owed = layer.group.owed(room.request.num_tokens, room.request.prefix)
        return self._mine(layer, range(owed.first, owed.end))

    def _bytes(self, layer: _Layer, room: Content) -> Bytes:
        owed = self._owed_tokens(layer, room)
        if isinstance(layer.group.kind, StateRow):
            return self._state(room.seed, layer)[: len(owed)]
        return self._tokens(room.seed, layer, owed)

    def _mine(self, layer: _Layer, tokens: range) -> NDArray[np.int64]:
        held = layer.shard.tokens
        positions = np.arange(tokens.start, tokens.stop, dtype=np.int64)
        mine: NDArray[np.int64] = positions[(positions - held.first) % held.step == 0]
        return mine

    def _at(
        self, layer: _Layer, tokens: NDArray[np.int64], where: RoomPages
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        local = (tokens - layer.shard.tokens.first) // layer.shard.tokens.step
        place, within = np.divmod(local, self.layout.page_tokens)
        return np.asarray(where.pages, dtype=np.int64)[place], within

    def _tokens(self, seed: int, layer: _Layer, tokens: NDArray[np.int64]) -> Bytes:
        units = range(layer.shard.units.first, layer.shard.units.end)
        name = f"{layer.group.name}.{layer.tensor.name}"
        return pattern(seed, name, layer.layer, tokens, units, layer.tensor.unit_bytes)

    def _state(self, seed: int, layer: _Layer) -> Bytes:
        return self._tokens(seed, layer, np.zeros(1, dtype=np.int64))
