"""Simulated memory, byte by byte: pools, pages with owners, staging slots.

Every byte of a room has a value that follows from its coordinates, so a byte
that is missing, stale, from another room or in the wrong place is seen. Freed
memory is poisoned, so that whoever still reads it is seen too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Order, Shard
from kvferry.layout.spec import Group, StateRow
from kvferry.plan.bind import Descriptors, PagedView
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Request

Bytes = NDArray[np.uint8]
POISON = 0


@dataclass(eq=False)
class SimAllocation:
    """The pages of one room at one rank, from the engine's point of view."""

    room: int
    request: Request
    pages: dict[str, list[int]]
    live: bool = True
    generation: int = -1

    def side_tables(self) -> dict[str, PageTable]:
        """As a binding takes them."""
        return {group: PageTable(pages) for group, pages in self.pages.items()}


@dataclass(eq=False)
class SimMemory:
    """One rank's pools and staging slots."""

    layout: Layout
    rank: int
    num_pages: int
    num_rows: int
    num_slots: int
    slot_bytes: int
    regions: list[Bytes] = field(init=False)
    hits: list[Bytes] = field(init=False)
    slots: list[Bytes] = field(init=False)
    free: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        pools = contiguous_pools(self.layout, self.rank, self.num_pages, self.num_rows)
        self.pools = pools.map
        self.regions = [np.full(size, POISON, np.uint8) for size in pools.region_bytes]
        self.hits = [np.zeros(size, np.uint8) for size in pools.region_bytes]
        self.slots = [np.full(self.slot_bytes, POISON, np.uint8) for _ in range(self.num_slots)]
        self.held: dict[str, Shard] = {h.group: h for h in self.layout.rank_shards(self.rank)}
        self.groups = {group.name: group for group in self.layout.spec.groups}
        self.free = {
            name: list(range(self.num_rows if self._is_slot(name) else self.num_pages))
            for name in self.held
        }
        self._views: dict[tuple[str, str, int, bool], Bytes] = {}

    def _is_slot(self, group: str) -> bool:
        return isinstance(self.groups[group].kind, StateRow)

    # ------------------------------------------------------------ pages

    def allocate(self, room: int, request: Request) -> SimAllocation | None:
        """Pages for a whole request, or None if the pool is too full right now."""
        needed = {name: self._num_pages(name, request) for name in self.held}
        if any(len(self.free[name]) < count for name, count in needed.items()):
            return None
        pages = {name: [self.free[name].pop() for _ in range(n)] for name, n in needed.items()}
        return SimAllocation(room, request, pages)

    def release(self, allocation: SimAllocation) -> None:
        """Give pages back, poisoned."""
        allocation.live = False
        for name, pages in allocation.pages.items():
            for tensor in self.groups[name].tensors:
                for layer in self._layers(name):
                    self.view(name, tensor.name, layer)[pages] = POISON
                    self.view(name, tensor.name, layer, hits=True)[pages] = 0
            self.free[name] = pages + self.free[name]

    def _num_pages(self, name: str, request: Request) -> int:
        if self._is_slot(name):
            return 1
        local = self.held[name].tokens.clip(Span(0, request.num_tokens)).num_tokens
        return -(-local // self.layout.page_tokens)

    def _layers(self, name: str) -> tuple[int, ...]:
        return self.groups[name].layers_in(self.held[name].layers)

    def view(self, name: str, tensor: str, layer: int, hits: bool = False) -> Bytes:
        """One layer as [page, token, unit, byte], whatever its order in memory."""
        key = (name, tensor, layer, hits)
        if key not in self._views:
            placement = self.pools.of(name, tensor)
            (base,) = placement.bases_of((layer,))
            region = (self.hits if hits else self.regions)[base.region]
            units = len(self.held[name].units)
            page = 1 if self._is_slot(name) else self.layout.page_tokens
            width = next(t.unit_bytes for t in self.groups[name].tensors if t.name == tensor)
            if self.layout.order is Order.NHD:
                self._views[key] = region.reshape(-1, page, units, width)
            else:
                self._views[key] = region.reshape(-1, units, page, width).swapaxes(1, 2)
        return self._views[key]

    # ------------------------------------------------------------ contents

    def _at(self, allocation: SimAllocation, name: str, tokens: Tokens) -> tuple[Bytes, ...]:
        """Page and position of each token, as index arrays, and the tokens."""
        held = self.held[name].tokens
        assert tokens.end is not None
        positions = np.arange(tokens.first, tokens.end, tokens.step)
        if self._is_slot(name):
            zero = np.zeros(len(positions), np.int64)
            return np.full(len(positions), allocation.pages[name][0]), zero, positions  # type: ignore[return-value]
        index, within = np.divmod((positions - held.first) // held.step, self.layout.page_tokens)
        return np.array(allocation.pages[name], np.int64)[index], within, positions  # type: ignore[return-value]

    def compute(
        self, allocation: SimAllocation, tokens: Span, layers: Span | None = None, *, states: bool
    ) -> None:
        """What a forward pass leaves in the pages: the room's values for those tokens."""
        for name, held in self.held.items():
            if self._is_slot(name) != states:
                continue
            last = Span(max(0, tokens.end - 1), tokens.end)
            mine = Tokens().clip(last) if states else held.tokens.clip(tokens)
            if mine.num_tokens:
                some = [n for n in self._layers(name) if layers is None or n in layers]
                self._fill(allocation, name, mine, some)

    def _fill(self, allocation: SimAllocation, name: str, mine: Tokens, layers: list[int]) -> None:
        pages, within, positions = self._at(allocation, name, mine)
        for tensor in range(len(self.groups[name].tensors)):
            for layer in layers:
                view = self.view(name, self.groups[name].tensors[tensor].name, layer)
                view[pages, within] = self._values(allocation.room, name, tensor, layer, positions)

    def _values(self, room: int, name: str, tensor: int, layer: int, positions: Bytes) -> Bytes:
        """The value of every byte follows from where it belongs. Never POISON."""
        held, group = self.held[name], self.groups[name]
        units = np.arange(held.units.first, held.units.end)
        width = np.arange(group.tensors[tensor].unit_bytes)
        salt = room * 53 + list(self.groups).index(name) * 17 + tensor * 29 + layer * 71
        value = (
            salt + positions[:, None, None].astype(np.int64) * 13 + units[:, None] * 37 + width * 3
        )
        return (value % 251 + 1).astype(np.uint8)

    def problem(self, allocation: SimAllocation) -> str | None:
        """What is wrong with a room that was reported done: bytes, or how often written."""
        request = allocation.request
        for name, held in self.held.items():
            group: Group = self.groups[name]
            owed = group.owed(request.num_tokens, request.prefix)
            mine = Tokens().clip(owed) if self._is_slot(name) else held.tokens.clip(owed)
            pages, within, positions = self._at(allocation, name, mine)
            for index, tensor in enumerate(group.tensors):
                for layer in self._layers(name):
                    where = f"{name}.{tensor.name} layer {layer}"
                    hits = self.view(name, tensor.name, layer, hits=True)
                    if not (hits[pages, within] == 1).all():
                        return f"{where}: owed bytes were not written exactly once"
                    if int(hits[allocation.pages[name]].sum()) != hits[pages, within].size:
                        return f"{where}: bytes were written that were not owed"
                    got = self.view(name, tensor.name, layer)[pages, within]
                    want = self._values(allocation.room, name, index, layer, positions)
                    if not np.array_equal(got, want):
                        return f"{where}: wrong bytes"
        return None

    # ------------------------------------------------------------ moving

    def side(self, tables: dict[str, PageTable]) -> PagedView:
        """One half of a binding."""
        return PagedView(self.pools, tables)

    def store(self, pieces: Descriptors, data: list[bytes]) -> None:
        """Put pieces into the pools, and count each byte."""
        rows = zip(pieces.target_region, pieces.target_offset, pieces.length, data, strict=True)
        for region, at, length, piece in rows:
            self.regions[region][at : at + length] = np.frombuffer(piece, np.uint8)
            self.hits[region][at : at + length] += 1


def fetch(regions: list[Bytes], pieces: Descriptors) -> list[bytes]:
    """Read pieces out of memory."""
    rows = zip(pieces.source_region, pieces.source_offset, pieces.length, strict=True)
    return [regions[region][at : at + length].tobytes() for region, at, length in rows]
