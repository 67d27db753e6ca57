"""Tables for the GPU, read entry by entry, lead to the sums that the CPU computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from checksums import labelled_value
from hypothesis import given, settings
from moving import Rank, filled, random_cache
from summing import cells_of, sums_of
from transfers import transfers

from kvferry.layout import DType, Layout, Order, Parallel, attention
from kvferry.layout.spec import CacheSpec, Group, StateRow, Tensor
from kvferry.memory.checksum.gpu_tables import (
    HEADER,
    ITEM,
    SumTable,
    joined,
    table_of,
    tile_of,
    tiles_of,
)
from kvferry.plan import Plan, RankPair, Request, reshard
from kvferry.plan.content import ALL_CELLS, CHUNK_BYTES, ProofRequest
from kvferry.plan.places import Base, Int64s, Placement


def allocate(size: int) -> Int64s:
    return np.empty(size + 3, np.int64)


def entry_values(table: SumTable, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the cell and the value of each entry, found as the kernel finds it."""
    numbers = table.numbers.tolist()
    header = numbers[:HEADER]
    num_tiles, num_chunks, units, _, first_unit, stride, unit_bytes = header[:7]
    element_bytes, element_stride, offsets, positions = header[7:]
    assert num_chunks == -(-unit_bytes // CHUNK_BYTES)
    assert table.num_programs == num_tiles * num_chunks
    assert table.tile.is_strided == (element_bytes != element_stride)
    for first in range(HEADER, HEADER + table.num_items * ITEM, ITEM):
        address, label, cell, first_token, num_tokens = numbers[first : first + ITEM]
        assert num_tokens * units <= num_tiles * table.tile.num_rows
        assert num_tokens * units * unit_bytes <= table.item_bytes
        for token in range(first_token, first_token + num_tokens):
            for unit in range(units):
                at = address + numbers[offsets + token] + unit * stride
                assert at % table.tile.word == 0
                content = b"".join(
                    ctypes.string_at(at + element * element_stride, element_bytes)
                    for element in range(unit_bytes // element_bytes)
                )
                place = numbers[positions + token], first_unit + unit
                yield cell, labelled_value(seed, label % 2**64, *place, content)


def table_sums(plan: Plan, pair: RankPair, request: Request, rank: Rank, seed: int) -> bytes:
    proof = ProofRequest(seed, ALL_CELLS // 2)
    addresses = [region.ctypes.data for region in rank.regions]
    num_cells, entries = cells_of(plan, pair, request, rank, proof)
    sums = [0] * num_cells
    tiles = tiles_of(rank.side.pools, plan.spec, addresses)
    for each in joined(entries, tiles):
        for cell, value in entry_values(table_of(*each, addresses, allocate), seed):
            sums[cell] += value
    return b"".join((one % 2**64).to_bytes(8, "little") for one in sums)


@given(transfers())
@settings(max_examples=60, deadline=None)
def test_tables_lead_to_the_sums_of_the_cpu(transfer: tuple[Plan, Request, int, str]) -> None:
    plan, request, seed, _ = transfer
    rng = np.random.default_rng(seed)
    cache = random_cache(plan.spec, request.num_tokens, rng)
    for rank in filled(plan.source, cache, request, rng):
        for target in plan.targets_of(rank.rank):
            pair = RankPair(rank.rank, target)
            sums = sums_of(plan, pair, request, rank, ProofRequest(seed, ALL_CELLS // 2))
            assert table_sums(plan, pair, request, rank, seed) == sums


def tables_of(spec: CacheSpec, request: Request, order: Order = Order.NHD) -> list[SumTable]:
    """Return tables of what one rank of TP 2 sends another, with pages of 16 tokens."""
    plan = reshard(*[Layout(spec, Parallel(tp=2), page_tokens=16, order=order)] * 2)
    rng = np.random.default_rng(1)
    rank = filled(plan.source, random_cache(spec, request.num_tokens, rng), request, rng)[0]
    addresses = [0] * len(rank.regions)
    _, entries = cells_of(plan, RankPair(0, 0), request, rank)
    tiles = tiles_of(rank.side.pools, spec, addresses)
    return [table_of(*each, addresses, allocate) for each in joined(entries, tiles)]


@pytest.mark.parametrize(("order", "by_unit"), [(Order.NHD, 0), (Order.HND, 1)])
def test_rows_follow_memory(order: Order, by_unit: int) -> None:
    spec = attention(layers=1, kv_heads=4, head_dim=8)
    for table in tables_of(spec, Request(40), order):
        assert table.numbers[3] == by_unit


def test_long_requests_are_located_in_several_tables() -> None:
    spec = attention(layers=1, kv_heads=2, head_dim=1)
    sizes = [len(table.numbers) - HEADER for table in tables_of(spec, Request(20_000))]
    num_cells = [2 * 32, 2 * 32, 2 * 15]
    assert sizes == [
        cells * ITEM + 2 * tokens
        for cells, tokens in zip(num_cells, (8192, 8192, 3616), strict=True)
    ]


@pytest.mark.parametrize(("v_head_dim", "num_items"), [(8, [6]), (16, [3, 3])])
def test_tensors_that_lie_alike_share_a_table(v_head_dim: int, num_items: list[int]) -> None:
    spec = attention(layers=3, kv_heads=4, head_dim=8, v_head_dim=v_head_dim)
    assert [table.num_items for table in tables_of(spec, Request(40))] == num_items


def test_a_large_state_is_cut_into_chunks() -> None:
    group = Group("state", StateRow(), (0,), 4, (Tensor("h", DType.FLOAT32, 3000),))
    (table,) = tables_of(CacheSpec(1, (group,)), Request(5))
    assert (table.tile.width, table.num_programs, table.num_items) == (32, 3, 1)


def placed(**strides: int) -> Placement:
    given = {"page_stride": 4096, "token_stride": 512, "unit_stride": 256, **strides}
    return Placement("kv", "k", num_pages=8, bases=(Base(0, 0, 1024),), **given)


@pytest.mark.parametrize(
    ("at", "unit_bytes", "address", "word"),
    [
        (placed(), 256, 1 << 20, 16),
        (placed(), 248, 1 << 20, 8),
        (placed(), 132, 1 << 20, 4),
        (placed(unit_stride=66), 256, 1 << 20, 2),
        (placed(), 256, (1 << 20) + 1, 1),
        (placed(element_stride=64), 256, 1 << 20, 2),
    ],
)
def test_a_tile_reads_the_widest_word(
    at: Placement, unit_bytes: int, address: int, word: int
) -> None:
    tile = tile_of(at, unit_bytes, 2, [address])
    assert (tile.word, tile.is_strided) == (word, at.element_stride is not None)


@pytest.mark.parametrize(
    ("unit_bytes", "width"), [(1, 1), (8, 1), (12, 2), (24, 4), (256, 8), (1152, 32), (10**6, 32)]
)
def test_a_tile_is_as_wide_as_its_rows_need(unit_bytes: int, width: int) -> None:
    tile = tile_of(placed(), unit_bytes, 1, [0])
    assert (tile.width, tile.width * tile.num_rows) == (width, 1024)
