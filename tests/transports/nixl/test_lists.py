"""Prepared lists: cells name the same bytes as listed descriptors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.regions import Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, grid
from kvferry.transports.nixl.batches import DescriptorBatch, NixlMemory, make_batches
from kvferry.transports.nixl.lists import MAX_LISTS, CellBatch, CellLists, cell_batches

PAGE, MIB = 512, 1 << 20
GPU = Device("cuda", 2)
FLAT = Stride(0, 0)


class PreparedList(NamedTuple):
    """A list that NIXL prepared, and its agent."""

    agent: str
    rows: NDArray[np.uint64]
    memory_type: str

    def cell(self, number: int) -> tuple[int, int, int]:
        """Return the address, length and device of a cell."""
        for address, length, device, stride, count in self.rows.tolist():
            if number < count:
                return address + number * stride, length, device
            number -= count
        raise AssertionError("the list has fewer cells")


class Agent:
    """Keeps the lists that it prepares."""

    def __init__(self, *, fails: bool = False) -> None:
        self.prepared: list[PreparedList] = []
        self.fails = fails

    def prep_xfer_dlist(self, agent: str, rows: Any, memory_type: str) -> PreparedList:
        if self.fails:
            raise KeyError("no strided lists")
        self.prepared.append(PreparedList(agent, rows, memory_type))
        return self.prepared[-1]

    def make_prepped_xfer(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def sides(*regions: Region) -> tuple[CellLists, CellLists]:
    memory = NixlMemory(regions)
    return CellLists(memory, ""), CellLists(memory, "peer")


def pages(
    source: list[int],
    target: list[int],
    lengths: list[int],
    source_bases: tuple[Base, ...] = (Base(0, 0, 0),),
    target_bases: tuple[Base, ...] = (Base(0, 0, 0),),
) -> BindingPart:
    ours, theirs, sizes = (np.array(column, np.int64) for column in (source, target, lengths))
    one = np.ones(len(lengths), dtype=np.int64)
    pieces = Pieces(ours, theirs, sizes, one, one, FLAT, FLAT, whole_pages=True)
    return BindingPart("kv", "k", source_bases, target_bases, pieces)


def copied(batches: list[CellBatch | DescriptorBatch]) -> list[tuple[int, ...]]:
    """Return each piece of the batches: source, target, length and the two devices."""
    found: list[tuple[int, ...]] = []
    for batch in batches:
        if isinstance(batch, CellBatch):
            cells = zip(batch.source_cells.tolist(), batch.target_cells.tolist(), strict=True)
            rows = [
                (batch.source.handle.cell(ours), batch.target.handle.cell(theirs))
                for ours, theirs in cells
            ]
        else:
            listed = zip(batch.source, batch.target, strict=True)
            rows = [(tuple(map(int, ours)), tuple(map(int, theirs))) for ours, theirs in listed]
        for (read, length, device), (written, same, other) in rows:
            assert length == same
            found.append((read, written, length, device, other))
    return found


def each_byte(pieces: list[tuple[int, ...]], unit: int) -> list[tuple[int, ...]]:
    """Return the pieces in units, sorted, so that merging does not matter."""
    return sorted(
        (read + i, written + i, *devices)
        for read, written, length, *devices in pieces
        for i in range(0, length, unit)
    )


POOL = 64
CHOSEN = st.permutations(range(POOL)).map(lambda pages: pages[:20])


@settings(max_examples=50, deadline=None)
@given(CHOSEN, CHOSEN, st.sampled_from([PAGE, 64, 3]), st.sampled_from([1, 2, 5]))
def test_cells_are_the_bytes_of_listed_descriptors(
    source: list[int], target: list[int], last: int, stride: int
) -> None:
    """Pages that are adjacent or far apart, tensors in one region or two, a partial last page."""
    size = POOL * stride * PAGE
    regions = [Region(4096, 3 * size, GPU), Region(1 << 30, 100), Region(1 << 40, 2 * size, GPU)]
    regions[1] = regions[1]._replace(device=GPU)
    step = stride * PAGE
    part = pages(
        [page * step for page in source],
        [page * step for page in target],
        [*[PAGE] * 19, last],
        (Base(0, 0, size), Base(1, 2, 0)),
        (Base(0, 2, size), Base(1, 0, 2 * size)),
    )
    binding = Binding((part, part._replace(source_bases=part.source_bases[::-1])))
    ours, theirs = sides(*regions)
    agent = Agent()
    made = cell_batches(binding, ours, theirs, agent)
    assert made is not None
    listed = make_batches(binding, ours.memory, theirs.memory)
    assert each_byte(copied(made), 1) == each_byte(copied([*listed]), 1)
    by_cells = sum(len(one.source_cells) for one in made if isinstance(one, CellBatch))
    assert by_cells == 2 * 2 * (20 if last == PAGE else 19)
    assert [(one.agent, one.memory_type) for one in agent.prepared] == [
        ("", "VRAM"),
        ("peer", "VRAM"),
    ]
    # A row for each region that holds a cell, whatever its number of pages.
    assert {len(one.rows) for one in agent.prepared} == {2}


def test_tensors_of_different_widths_have_a_list_each() -> None:
    ours, theirs = sides(Region(0, MIB))
    wide = pages([i * PAGE for i in range(9)], [i * PAGE for i in range(9)], [PAGE] * 9)
    narrow = pages([i * 64 for i in range(9)], [MIB - 64 - i * 64 for i in range(9)], [64] * 9)
    agent = Agent()
    made = cell_batches(Binding((wide, narrow)), ours, theirs, agent)
    assert made is not None
    listed = make_batches(Binding((wide, narrow)), ours.memory, theirs.memory)
    assert each_byte(copied(made), 1) == each_byte(copied([*listed]), 1)
    assert len(made) == 2
    assert len(agent.prepared) == 4


def test_pieces_that_are_no_cells_are_listed() -> None:
    ours, theirs = sides(Region(0, MIB), Region(MIB, MIB))
    agent = Agent()
    starts = [i * PAGE for i in range(9)]
    off = pages([start + 8 for start in starts], starts, [PAGE] * 9)
    elsewhere = pages(starts, starts, [PAGE] * 9, (Base(0, 0, 8),))
    slices = grid(16, 64, Stride(128, 128))
    few = binding_of([PlacedPiece(0, 0, PAGE)])
    for binding in (Binding((off,)), Binding((elsewhere,)), slices, few, binding_of([])):
        assert cell_batches(binding, ours, theirs, agent) is None
    good = pages(starts, starts, [PAGE] * 9, (Base(0, 1, 0),))
    both = Binding((good, elsewhere))
    made = cell_batches(both, ours, theirs, agent)
    assert made is not None
    assert {type(batch) for batch in made} == {CellBatch, DescriptorBatch}
    listed = make_batches(both, ours.memory, theirs.memory)
    assert each_byte(copied(made), 1) == each_byte(copied([*listed]), 1)


def test_batches_are_cut_by_bytes_on_the_host_and_by_descriptors_on_a_gpu() -> None:
    """Neighbours become one descriptor."""
    page = 64 << 10
    starts = [i * page for i in range(2000)]
    together = Binding((pages(starts, starts, [page] * 2000),))
    apart = Binding((pages(starts, starts[::-1], [page] * 2000),))
    counts = {}
    for device in (Device(), GPU):
        for name, binding in (("together", together), ("apart", apart)):
            made = cell_batches(binding, *sides(Region(0, 1 << 30, device)), Agent())
            assert made is not None
            assert sum(len(one.source_cells) for one in made if isinstance(one, CellBatch)) == 2000
            counts[str(device), name] = len(made)
    assert counts == {
        ("cpu", "together"): 4,
        ("cpu", "apart"): 5,
        ("cuda:2", "together"): 1,
        ("cuda:2", "apart"): 4,
    }


def test_memory_that_no_list_can_hold() -> None:
    starts = [i * PAGE for i in range(9)]
    binding = Binding((pages(starts, starts, [PAGE] * 9),))
    mixed = sides(Region(0, MIB), Region(0, MIB, GPU))
    assert cell_batches(binding, *mixed, Agent()) is None
    assert cell_batches(binding, *sides(Region(0, MIB)), Agent(fails=True)) is None
    huge = sides(Region(0, 1 << 50))
    assert cell_batches(binding, *huge, Agent()) is None


def test_the_least_recently_used_list_is_dropped() -> None:
    ours, _ = sides(Region(0, MIB))
    agent = Agent()
    first = ours.get(agent, 1)
    for size in range(2, MAX_LISTS + 1):
        ours.get(agent, size)
    assert ours.get(agent, 1) is first
    ours.get(agent, MAX_LISTS + 1)
    assert ours.get(agent, 1) is first
    assert len(agent.prepared) == MAX_LISTS + 1
    ours.get(agent, 2)
    assert len(agent.prepared) == MAX_LISTS + 2
    ours.clear()
    assert ours.get(agent, 1) is not first
