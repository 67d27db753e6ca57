"""Simulated memory: pools, page allocation and staging slots, checked byte by byte.

The value of every byte of a room follows from its coordinates, so a byte that is missing, stale,
misplaced or from another room is found. Released memory is poisoned, so a late read is found too.
"""

from __future__ import annotations

import hashlib
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Order, Shard
from kvferry.layout.spec import Group, StateRow
from kvferry.layout.tokens import Tokens
from kvferry.plan.bind import Descriptors, PagedView
from kvferry.plan.content import ContentView, cell_entries, cells_between, num_chosen
from kvferry.plan.places import PageTable, contiguous_pools
from kvferry.plan.plan import Request
from kvferry.protocol.events import Prove

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
POISON = 0


@dataclass(eq=False)
class SimAllocation:
    """The pages of one room at one rank, by group. ``room`` is the job's number."""

    room: int
    request: Request
    pages: dict[str, list[int]]
    generation: int = -1


class _Layer(NamedTuple):
    """One layer of one tensor as ``[page, token, unit, byte]``, and how often each was written."""

    tensor: int
    layer: int
    values: Bytes
    hits: Bytes


class SimMemory:
    """One rank's pools and staging slots."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        num_pages: int,
        num_rows: int,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        pools = contiguous_pools(layout, rank, num_pages, num_rows)
        self.pools = pools.map
        self.slot_bytes = slot_bytes
        self.regions = [np.full(size, POISON, np.uint8) for size in pools.region_bytes]
        self.hits = [np.zeros(size, np.uint8) for size in pools.region_bytes]
        self.slots = [np.full(slot_bytes, POISON, np.uint8) for _ in range(num_slots)]
        self._layout = layout
        self._all_shards = layout.rank_shards(rank)
        self._shards: dict[str, Shard] = {one.group: one for one in self._all_shards}
        self._groups = {group.name: group for group in layout.spec.groups}
        self._layers = {name: self._layers_of(name) for name in self._shards}
        self._free = {
            name: list(range(num_rows if self._is_state(name) else num_pages))
            for name in self._shards
        }

    def beside(self, num_slots: int) -> SimMemory:
        """Return the same pages with slots of another endpoint of the process."""
        other = copy(self)
        other.slots = [np.full(self.slot_bytes, POISON, np.uint8) for _ in range(num_slots)]
        return other

    def _is_state(self, group: str) -> bool:
        return isinstance(self._groups[group].kind, StateRow)

    def _layers_of(self, name: str) -> list[_Layer]:
        group = self._groups[name]
        return [
            _Layer(
                index,
                layer,
                self._view(self.regions, name, index, layer),
                self._view(self.hits, name, index, layer),
            )
            for index in range(len(group.tensors))
            for layer in group.layers_in(self._shards[name].layers)
        ]

    def _view(self, regions: list[Bytes], name: str, index: int, layer: int) -> Bytes:
        tensor = self._groups[name].tensors[index]
        (base,) = self.pools.of(name, tensor.name).bases_of((layer,))
        page = self._layout.page_entries(self._groups[name])
        units, width = len(self._shards[name].units), tensor.unit_bytes
        if self._layout.order is Order.NHD:
            return regions[base.region].reshape(-1, page, units, width)
        return regions[base.region].reshape(-1, units, page, width).swapaxes(1, 2)

    # ------------------------------------------------------------ pages

    def allocate(self, room: int, request: Request) -> SimAllocation | None:
        """Return pages for a whole request, or None if too few are free."""
        needed = {name: self._num_pages(name, request) for name in self._shards}
        if any(len(self._free[name]) < count for name, count in needed.items()):
            return None
        pages = {name: [self._free[name].pop() for _ in range(n)] for name, n in needed.items()}
        return SimAllocation(room, request, pages)

    def overwrite(self, allocation: SimAllocation) -> None:
        """Poison pages."""
        for name, pages in allocation.pages.items():
            for one in self._layers[name]:
                one.values[pages] = POISON
                one.hits[pages] = 0

    def release(self, allocation: SimAllocation) -> None:
        """Free pages and poison them."""
        self.overwrite(allocation)
        for name, pages in allocation.pages.items():
            self._free[name] = pages + self._free[name]

    def _num_pages(self, name: str, request: Request) -> int:
        if self._is_state(name):
            return 1
        local = self._shards[name].tokens.clip(Span(0, request.num_tokens)).num_tokens
        return -(-local // self._layout.page_entries(self._groups[name]))

    # ------------------------------------------------------------ contents

    def _locate(
        self, allocation: SimAllocation, name: str, tokens: Tokens
    ) -> tuple[Index, Index, Index]:
        """Return the page of each token, its place in the page, and its position."""
        assert tokens.end is not None
        positions = np.array([t for t in range(tokens.first, tokens.end) if t in tokens], np.int64)
        if self._is_state(name):
            zero = np.zeros(len(positions), np.int64)
            return np.full(len(positions), allocation.pages[name][0]), zero, positions
        held = self._shards[name].tokens
        local = np.cumsum([t in held for t in range(tokens.end)]) - 1
        index, within = np.divmod(local[positions], self._layout.page_entries(self._groups[name]))
        return np.array(allocation.pages[name], np.int64)[index], within, positions

    def compute(
        self, allocation: SimAllocation, tokens: Span, layers: Span | None = None, *, states: bool
    ) -> None:
        """Fill a room's pages, or its state rows, as a forward pass over these tokens does."""
        for name, shard in self._shards.items():
            if self._is_state(name) != states:
                continue
            last = Span(max(0, tokens.end - 1), tokens.end)
            mine = Tokens().clip(last) if states else shard.tokens.clip(tokens)
            if not mine.num_tokens:
                continue
            pages, within, positions = self._locate(allocation, name, mine)
            for one in self._layers[name]:
                if layers is None or one.layer in layers:
                    one.values[pages, within] = self._expected(
                        allocation.room, name, one, positions
                    )

    def _expected(self, room: int, name: str, one: _Layer, positions: Index) -> Bytes:
        """Return the room's bytes of one layer at these positions. None of them is ``POISON``."""
        shard, group = self._shards[name], self._groups[name]
        units = np.arange(shard.units.first, shard.units.end)
        width = np.arange(group.tensors[one.tensor].unit_bytes)
        salt = room * 53 + list(self._groups).index(name) * 17 + one.tensor * 29 + one.layer * 71
        value = salt + positions[:, None, None] * 13 + units[:, None] * 37 + width * 3
        return (value % 251 + 1).astype(np.uint8)

    def find_error(self, allocation: SimAllocation) -> str | None:
        """Return what is wrong with a room that was reported done: its bytes or its writes."""
        request = allocation.request
        if not request.num_tokens:
            held = (
                (one, allocation.pages[name]) for name in self._shards for one in self._layers[name]
            )
            written = any(one.hits[pages].any() for one, pages in held)
            return "bytes of an empty room were written" if written else None
        for name, shard in self._shards.items():
            group: Group = self._groups[name]
            owed = group.owed(request.num_tokens, request.prefix)
            mine = Tokens().clip(owed) if self._is_state(name) else shard.tokens.clip(owed)
            pages, within, positions = self._locate(allocation, name, mine)
            for one in self._layers[name]:
                where = f"{name}.{group.tensors[one.tensor].name} layer {one.layer}"
                hits = one.hits[pages, within]
                if not (hits == 1).all():
                    return f"{where}: expected bytes were not written exactly once"
                if int(one.hits[allocation.pages[name]].sum()) != hits.size:
                    return f"{where}: bytes were written that were not expected"
                expected = self._expected(allocation.room, name, one, positions)
                if not np.array_equal(one.values[pages, within], expected):
                    return f"{where}: wrong bytes"
        return None

    def sums(self, action: Prove, allocation: SimAllocation) -> bytes:
        """Return the sums of a proof: a hash of each entry with its coordinates, added up."""
        about = action.plan, action.pair, action.request, action.proof
        side = self.side(allocation)
        view = ContentView(self._layout, self._all_shards, side.pools, side.tables)
        sums = [0] * num_chosen(cells_between(*about))
        found = cell_entries(*about, view)
        for each in (column for entries in found for column in entries.columns()):
            rows = zip(each.cells[:, 0].tolist(), each.bases, each.labels.tolist(), strict=True)
            for cell, base, label in rows:
                for at, position in zip(each.offsets, each.positions.tolist(), strict=True):
                    for index, unit in enumerate(range(each.units.first, each.units.end)):
                        first = base.offset + int(at) + index * each.at.unit_stride
                        content = self.regions[base.region][first : first + each.unit_bytes]
                        named = f"{label} {position} {unit} ".encode() + content.tobytes()
                        value = hashlib.blake2b(named, digest_size=8).digest()
                        sums[cell] += int.from_bytes(value, "little")
        return b"".join((value % 2**64).to_bytes(8, "little") for value in sums)

    # ------------------------------------------------------------ transfers

    def side(self, allocation: SimAllocation) -> PagedView:
        """Return this rank's side of a binding."""
        tables = {group: PageTable(pages) for group, pages in allocation.pages.items()}
        return PagedView(self.pools, tables)

    def store(self, pieces: Descriptors, data: list[bytes]) -> None:
        """Write pieces into the pools and count each byte."""
        rows = zip(pieces.target_region, pieces.target_offset, pieces.length, data, strict=True)
        for region, at, length, piece in rows:
            self.regions[region][at : at + length] = np.frombuffer(piece, np.uint8)
            self.hits[region][at : at + length] += 1


def fetch(regions: list[Bytes], pieces: Descriptors) -> list[bytes]:
    """Read pieces from memory."""
    rows = zip(pieces.source_region, pieces.source_offset, pieces.length, strict=True)
    return [regions[region][at : at + length].tobytes() for region, at, length in rows]
