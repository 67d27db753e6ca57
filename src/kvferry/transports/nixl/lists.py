"""Prepared descriptor lists: the regions of one side, cut into cells of one size.

Whole pages lie in such cells: a tensor's first page and the distance between pages are multiples of
what a page holds of it. A write then names its pages by the numbers of their cells. NIXL looks up
the regions once for each list instead of once for each page, and merges neighbouring pages itself.

A list has one strided row per region, about 100 bytes, however many pages there are. A side has at
most ``MAX_LISTS`` lists. Those of a peer end with the peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces
from kvferry.plan.places import Base, Int64s
from kvferry.transports.nixl.batches import (
    DescriptorBatch,
    NixlMemory,
    batch_costs,
    batch_ranges,
    fits_one_batch,
    make_batches,
)
from kvferry.transports.single_descriptor import SingleDescriptor

Int32s = NDArray[np.int32]

# Sizes of cells for which each side keeps a list.
MAX_LISTS = 16
# NIXL's indices have 32 bits.
_MAX_CELLS = 1 << 31
# With fewer pieces, listing them costs no more.
_FEW_CELLS = 8
_MAX_CACHED = 256


class CellList:
    """A prepared list. NIXL releases it with the last reference to its handle."""

    def __init__(self, handle: Any, num_bytes: int, first_cells: Sequence[int | None]) -> None:
        self.handle = handle
        self._num_bytes = num_bytes
        # The number of each region's first cell; None for a region without cells.
        self._first_cells = first_cells
        self._starts: dict[tuple[Base, Base], tuple[tuple[Base, ...], Int64s | None]] = {}

    def starts(self, bases: tuple[Base, ...]) -> Int64s | None:
        """Return the cell at each base; None if a base is not the beginning of a cell."""
        # Comparing is fast, since the bases are usually the same objects. Hashing all is not.
        key = bases[0], bases[-1]
        cached = self._starts.get(key)
        if cached is not None and cached[0] == bases:
            return cached[1]
        if len(self._starts) >= _MAX_CACHED:
            self._starts.clear()
        starts = self._starts_of(bases)
        self._starts[key] = bases, starts
        return starts

    def _starts_of(self, bases: tuple[Base, ...]) -> Int64s | None:
        cells: list[int] = []
        for base in bases:
            first = self._first_cells[base.region]
            if first is None or base.offset % self._num_bytes:
                return None
            cells.append(first + base.offset // self._num_bytes)
        return np.array(cells, dtype=np.int64)


class CellLists:
    """The prepared lists of one side's regions, by the size of their cells."""

    def __init__(self, memory: NixlMemory, agent_name: str) -> None:
        self.memory = memory
        # The peer's name; empty for the local side.
        self._agent_name = agent_name
        self._lists: OrderedDict[int, CellList | None] = OrderedDict()

    def get(self, agent: Any, num_bytes: int) -> CellList | None:
        """Return the list with cells of this size; None if there is none for this memory."""
        if num_bytes in self._lists:
            self._lists.move_to_end(num_bytes)
            return self._lists[num_bytes]
        made = self._lists[num_bytes] = self._make(agent, num_bytes)
        if len(self._lists) > MAX_LISTS:
            self._lists.popitem(last=False)
        return made

    def _make(self, agent: Any, num_bytes: int) -> CellList | None:
        if len(set(self.memory.types)) != 1:
            return None
        counts = [region.num_bytes // num_bytes for region in self.memory.regions]
        if not 0 < sum(counts) < _MAX_CELLS:
            return None
        ends = np.cumsum(counts).tolist()
        first = [end - count if count else None for end, count in zip(ends, counts, strict=True)]
        rows = [
            (region.address, num_bytes, region.device.number, num_bytes, count)
            for region, count in zip(self.memory.regions, counts, strict=True)
            if count
        ]
        try:
            handle = agent.prep_xfer_dlist(
                self._agent_name, np.array(rows, dtype=np.uint64), self.memory.types[0]
            )
        except Exception:  # Listing the pieces of a write works, or reports the problem.
            return None
        return CellList(handle, num_bytes, first)

    def clear(self) -> None:
        """Drop all lists."""
        self._lists.clear()


class CellBatch(NamedTuple):
    """One NIXL transfer between cells of two prepared lists."""

    source: CellList
    target: CellList
    source_cells: Int32s
    target_cells: Int32s
    single: SingleDescriptor | None = None

    def make_handle(self, agent: Any, _peer: str) -> Any:
        """Return a transfer handle, which submits nothing."""
        return agent.make_prepped_xfer(
            "WRITE", self.source.handle, self.source_cells, self.target.handle, self.target_cells
        )


class _WholePages(NamedTuple):
    """The segments of pieces that are whole pages, in cells from a base, and the other pieces."""

    num_bytes: int
    source: Int64s
    target: Int64s
    rest: Pieces | None

    @staticmethod
    def of(pieces: Pieces) -> _WholePages | None:
        """Return the whole pages; None if they are not cells, or not in one piece."""
        if not len(pieces.lengths) or ((pieces.rows != 1) | (pieces.cols != 1)).any():
            return None
        # Only the first and the last page may be partial.
        num_bytes = int(pieces.lengths[len(pieces.lengths) // 2])
        if num_bytes <= 0:
            return None
        whole = pieces.lengths == num_bytes
        rest = None
        if not whole.all():
            rest = pieces.select(~whole)
        source, source_rest = np.divmod(pieces.source[whole], num_bytes)
        target, target_rest = np.divmod(pieces.target[whole], num_bytes)
        if source_rest.any() or target_rest.any():
            return None
        return _WholePages(num_bytes, source, target, rest)


class _CellWrite:
    """Cells of one pair of lists, from several parts of a binding."""

    def __init__(self, source: CellList, target: CellList) -> None:
        self.source = source
        self.target = target
        self._cells: list[tuple[Int64s, Int64s]] = []
        self.num_cells = 0

    def add(self, part: BindingPart, pages: _WholePages) -> bool:
        """Add the whole pages of a part; return False if they are not cells of the lists."""
        ours, theirs = self.source.starts(part.source_bases), self.target.starts(part.target_bases)
        if ours is None or theirs is None:
            return False
        cells = (ours[:, None] + pages.source).ravel(), (theirs[:, None] + pages.target).ravel()
        self._cells.append(cells)
        self.num_cells += len(cells[0])
        return True

    def batches(self, num_bytes: int, *, on_host: bool) -> list[CellBatch]:
        """Return the cells in batches that do not block the calling thread for long."""
        ours, theirs = (
            np.concatenate(side).astype(np.int32) for side in zip(*self._cells, strict=True)
        )
        if fits_one_batch(len(ours), len(ours) * num_bytes, on_host=on_host):
            return [CellBatch(self.source, self.target, ours, theirs)]
        # NIXL merges cells that are neighbours on both sides.
        is_first = np.ones(len(ours), dtype=bool)
        is_first[1:] = (np.diff(ours) != 1) | (np.diff(theirs) != 1)
        return [
            CellBatch(self.source, self.target, ours[first:end], theirs[first:end])
            for first, end in batch_ranges(batch_costs(num_bytes, is_first, on_host))
        ]


def cell_batches(
    binding: Binding, source: CellLists, target: CellLists, agent: Any
) -> list[CellBatch | DescriptorBatch] | None:
    """Return batches that name whole pages by their cells, and list all other pieces.

    None if too few pieces are whole pages. The binding is inside the regions.
    """
    if binding.size.num_pieces < _FEW_CELLS:
        return None
    writes: dict[int, _CellWrite] = {}
    rest: list[BindingPart] = []
    for parts in binding.parts_by_pieces():
        pages = _WholePages.of(parts[0].pieces)
        write = pages and _write_of(pages.num_bytes, writes, source, target, agent)
        for part in parts:
            if not pages or not write or not part.source_bases or not write.add(part, pages):
                rest.append(part)
            elif pages.rest is not None:
                rest.append(part._replace(pieces=pages.rest))
    if sum(write.num_cells for write in writes.values()) < _FEW_CELLS:
        return None
    batches: list[CellBatch | DescriptorBatch] = []
    on_host = source.memory.is_host and target.memory.is_host
    for num_bytes, write in writes.items():
        if write.num_cells:
            batches += write.batches(num_bytes, on_host=on_host)
    if rest:
        batches += make_batches(Binding(tuple(rest)), source.memory, target.memory)
    return batches


def _write_of(
    num_bytes: int, writes: dict[int, _CellWrite], source: CellLists, target: CellLists, agent: Any
) -> _CellWrite | None:
    """Return the write between cells of this size; None if a side has no such list."""
    if num_bytes not in writes:
        ours, theirs = source.get(agent, num_bytes), target.get(agent, num_bytes)
        if ours is None or theirs is None:
            return None
        writes[num_bytes] = _CellWrite(ours, theirs)
    return writes[num_bytes]
