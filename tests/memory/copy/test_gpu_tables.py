"""Tests of the GPU kernel's tables, which Python code executes here in place of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import Bytes, Rank, expected, filled, make_ranks, random_cache

from kvferry.errors import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.memory.copy.gpu_tables import (
    CUT_BYTES,
    HEADER,
    LARGE_BYTES,
    MAX_CACHED,
    MAX_COUNT,
    AddressCache,
    CopyTable,
    GpuCopy,
    KernelLaunch,
    batches,
    can_move_sources,
    table_of,
)
from kvferry.plan import Base, Binding, RankPair, Request, StagingView, bind, reshard
from kvferry.plan.bind import BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Int64s
from kvferry.testing.strategies import MAX_TOKENS, pairs

NO_STRIDE = Stride(0, 0)


def allocate(size: int) -> Int64s:
    return np.full(size + 3, -1, dtype=np.int64)  # more than asked for, and full of rubbish


class Space:
    """An address space: an array whose indices are addresses."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.zeros(16, dtype=np.uint8)
        self.written = np.zeros(0, dtype=np.int64)

    def add(self, region: Bytes, shift: int = 0) -> int:
        """Place a region ``shift`` bytes off a multiple of 16; its address."""
        at = -(-len(self.bytes) // 16) * 16 + shift
        gap = np.zeros(at - len(self.bytes), dtype=np.uint8)
        self.bytes = np.concatenate((self.bytes, gap, region))
        return at

    def play(self, table: CopyTable) -> None:
        """Do what the kernel does, as its table is described, and count every written byte."""
        self.written = np.zeros(len(self.bytes), dtype=np.int64)
        for launch in table.launches:
            for program in range(launch.num_programs):
                self._program(launch, table.numbers, program)

    def _program(self, launch: KernelLaunch, numbers: Int64s, program: int) -> None:
        part, place = divmod(program, launch.num_programs // launch.num_parts)
        at = launch.first + part * HEADER
        header = numbers[at : at + HEADER].tolist()
        tiles, layers, segments, per_segment, chunks, begin, *strides = header
        depth, tile = divmod(place, tiles)
        sources, targets = numbers[begin : begin + 2 * layers].reshape(2, -1)
        columns = numbers[begin + 2 * layers :][: 5 * segments].reshape(5, -1)
        first = depth * launch.depth
        for layer in range(first, min(first + launch.depth, layers)):
            for row in range(tile * launch.tile.num_rows, (tile + 1) * launch.tile.num_rows):
                segment, inside = divmod(row, per_segment)
                if segment < segments:
                    base = int(sources[layer]), int(targets[layer])
                    piece, chunk = divmod(inside, chunks)
                    self._row(launch, base, columns[:, segment].tolist(), strides, piece, chunk)

    def _row(
        self,
        launch: KernelLaunch,
        base: tuple[int, int],
        column: list[int],
        strides: list[int],
        piece: int,
        chunk: int,
    ) -> None:
        source, target, length, rows, cols = column
        row, col = divmod(piece, cols)
        begin = chunk * launch.tile.span
        size = min(length - begin, launch.tile.span)
        if row >= rows or size <= 0:
            return
        source += base[0] + row * strides[0] + col * strides[2] + begin
        target += base[1] + row * strides[1] + col * strides[3] + begin
        assert (source | target | size) % launch.tile.word == 0
        self.bytes[target : target + size] = self.bytes[source : source + size]
        self.written[target : target + size] += 1


def place(space: Space, ranks: list[Rank], shift: int = 0) -> list[tuple[int, ...]]:
    return [tuple(space.add(region, shift) for region in rank.regions) for rank in ranks]


def jobs_between(
    sources: list[Rank],
    targets: list[Rank],
    at: list[tuple[int, ...]],
    to: list[tuple[int, ...]],
    request: Request,
) -> list[GpuCopy]:
    plan = reshard(sources[0].layout, targets[0].layout)
    return [
        GpuCopy(bind(plan, RankPair(i, k), request, source.side, target.side), at[i], to[k])
        for i, source in enumerate(sources)
        for k, target in enumerate(targets)
    ]


@settings(max_examples=60, deadline=None)
@given(pairs(), st.integers(1, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.integers(0, 20))
def test_any_layout_to_any_layout(
    pair: tuple[Layout, Layout], tokens: int, prefix: int, shift: int
) -> None:
    """Every byte of the binding is written once, in aligned words, and no other byte."""
    request, rng = Request(tokens, min(prefix, tokens)), np.random.default_rng(shift)
    cache = random_cache(pair[0].spec, tokens, rng)
    sources, targets = filled(pair[0], cache, request, rng), make_ranks(pair[1], tokens, rng)
    wanted = expected(targets, cache, request)
    space = Space()
    at, to = place(space, sources, shift), place(space, targets)
    jobs = jobs_between(sources, targets, at, to, request)
    space.play(table_of(jobs, AddressCache(), allocate))
    assert space.written.max(initial=0) <= 1
    assert space.written.sum() == sum(job.binding.num_bytes for job in jobs)
    for addresses, regions in zip(to, wanted, strict=True):
        for address, want in zip(addresses, regions, strict=True):
            np.testing.assert_array_equal(space.bytes[address : address + len(want)], want)


@pytest.mark.parametrize("v_head_dim", [64, 48])
@pytest.mark.parametrize("by", [0, 16, 4096, -64])
def test_table_can_be_moved_to_another_slot(v_head_dim: int, by: int) -> None:
    """Both if K and V share their pieces, and if they do not."""
    spec = attention(layers=3, kv_heads=2, head_dim=64, v_head_dim=v_head_dim)
    layout = Layout(spec, page_tokens=4)
    (rank,) = make_ranks(layout, 16, np.random.default_rng(1))
    binding = bind(reshard(layout, layout), RankPair(0, 0), Request(16), StagingView(), rank.side)
    targets = tuple(1 << 20 for _ in rank.regions)
    job, moved = (
        GpuCopy(binding, (1 << 16,), targets),
        GpuCopy(binding, ((1 << 16) + by,), targets),
    )
    table, wanted = (table_of([each], AddressCache(), allocate) for each in (job, moved))
    table.move_sources(by)
    np.testing.assert_array_equal(table.numbers, wanted.numbers)
    assert table.launches == wanted.launches
    assert can_move_sources(job, moved)


def test_tables_that_cannot_be_moved() -> None:
    job = GpuCopy(Binding(()), (64,), (1, 2))
    assert not can_move_sources(job, job._replace(sources=(72,))), "words may be narrower there"
    assert not can_move_sources(job, job._replace(targets=(1, 3)))
    two = job._replace(sources=(64, 128))
    assert not can_move_sources(two, two), "each region of several would move by its own"
    assert not can_move_sources(job, two)


def gathers(target_tp: int, v_head_dim: int = 128, slot: int = 1 << 30) -> list[GpuCopy]:
    """Return one source's gathers for all its targets, with invented addresses."""
    spec = attention(layers=4, kv_heads=4, head_dim=128, v_head_dim=v_head_dim)
    source = Layout(spec, page_tokens=16)
    plan = reshard(source, Layout(spec, Parallel(tp=target_tp), page_tokens=16))
    (rank,) = make_ranks(source, 64, np.random.default_rng(0))
    addresses = tuple(1 << 20 for _ in rank.regions)
    return [
        GpuCopy(
            bind(plan, RankPair(0, target), Request(64), rank.side, StagingView()),
            addresses,
            (slot,),
        )
        for target in plan.targets_of(0)
    ]


def test_all_layers_tensors_and_targets_are_one_launch_of_wide_words() -> None:
    table = table_of(gathers(target_tp=4), AddressCache(), allocate)
    (launch,) = table.launches
    assert launch.tile.word == 16
    num_layers = table.numbers[1 : launch.num_parts * HEADER : HEADER]
    assert num_layers.sum() == 4 * 2 * 4


@pytest.mark.parametrize(("slot", "word"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1), (24, 8)])
def test_words_are_as_wide_as_the_addresses_allow(slot: int, word: int) -> None:
    jobs = gathers(target_tp=1, slot=(1 << 30) + slot)
    assert {x.tile.word for x in table_of(jobs, AddressCache(), allocate).launches} == {word}


def test_parts_with_other_words_have_a_separate_launch() -> None:
    launches = table_of(gathers(target_tp=2, v_head_dim=33), AddressCache(), allocate).launches
    assert sorted((x.tile.word, x.num_parts) for x in launches) == [(4, 2), (16, 2)]


def test_unused_stride_does_not_narrow_the_words() -> None:
    single = pieces([(0, 64, 4096)], Stride(3, 5))
    (launch,) = table_of([a_job(single)], AddressCache(), allocate).launches
    assert launch.tile.word == 16


def test_tensors_with_the_same_pieces_become_one_part() -> None:
    same = pieces([(0, 0, 512), (512, 1024, 512)])
    two, three = ((Base(0, 0, 0), Base(1, 0, 4096)), (Base(0, 0, 8192), Base(1, 0, 12288)))
    parts = tuple(BindingPart("kv", name, b, b, same) for name, b in (("k", two), ("v", three)))
    space = Space()
    rng = np.random.default_rng(1)
    source = space.add(rng.integers(0, 256, 16384, dtype=np.uint8))
    target = space.add(np.zeros(16384, dtype=np.uint8))
    table = table_of([GpuCopy(Binding(parts), (source,), (target,))], AddressCache(), allocate)
    assert [launch.num_parts for launch in table.launches] == [1]
    space.play(table)
    assert space.written.sum() == 4 * 2 * 512
    for base in (0, 4096, 8192, 12288):
        for at, to in ((0, 0), (512, 1024)):
            got = space.bytes[target + base + to :][:512]
            np.testing.assert_array_equal(got, space.bytes[source + base + at :][:512])


def test_runs_of_very_different_lengths_are_cut() -> None:
    """Otherwise nearly all programs would have no work."""
    longest = 10 * CUT_BYTES + 48
    runs = [(0, 0, longest), *((longest + i * 32, longest + i * 32, 16) for i in range(200))]
    space = Space()
    rng = np.random.default_rng(2)
    source = space.add(rng.integers(0, 256, longest + 200 * 32, dtype=np.uint8))
    target = space.add(np.zeros(longest + 200 * 32, dtype=np.uint8))
    table = table_of([a_job(pieces(runs), source, target)], AddressCache(), allocate)
    wasteful = len(runs) * longest / (table.launches[0].tile.span * table.launches[0].tile.num_rows)
    assert sum(launch.num_programs for launch in table.launches) < wasteful / 5
    space.play(table)
    assert space.written.sum() == longest + 200 * 16
    np.testing.assert_array_equal(space.bytes[target:][:longest], space.bytes[source:][:longest])


def test_cached_tables_are_never_confused() -> None:
    """One cache for requests that differ in one number each."""
    cache, rng = AddressCache(), np.random.default_rng(3)
    space = Space()
    regions = [space.add(rng.integers(0, 256, 8192, dtype=np.uint8)) for _ in range(3)]
    outs = [space.add(np.zeros(8192, dtype=np.uint8)) for _ in range(3)]
    base = [(Base(0, 0, 0), Base(1, 0, 512), Base(2, 0, 1024)),
            (Base(0, 0, 0), Base(1, 0, 768), Base(2, 0, 1024)),
            (Base(0, 0, 0), Base(1, 1, 512), Base(2, 0, 1024)),
            (Base(0, 0, 0), Base(1, 2, 512), Base(2, 0, 1024))]  # fmt: skip
    for length in (256, 250, 16, 256):
        for bases in base:
            for addresses in (tuple(regions), tuple(regions[::-1]), tuple(regions)):
                part = BindingPart(
                    "kv", "k", bases, bases, pieces([(0, 0, length), (2048, 4096, length)])
                )
                job = GpuCopy(Binding((part,)), addresses, tuple(outs))
                for out in outs:
                    space.bytes[out : out + 8192] = 0
                space.play(table_of([job], cache, allocate))
                for each in bases:
                    source, target = addresses[each.region], outs[each.region]
                    for at, to in ((0, 0), (2048, 4096)):
                        got = space.bytes[target + each.offset + to :][:length]
                        want = space.bytes[source + each.offset + at :][:length]
                        np.testing.assert_array_equal(got, want)


def test_reused_identity_gives_no_stale_addresses() -> None:
    """A new tuple may have the identity of one that was freed."""
    cache, target = AddressCache(), (Base(0, 0, 0),)
    for offset in range(3 * MAX_CACHED):
        part = BindingPart("kv", "k", (Base(0, 0, offset),), target, pieces([(0, 0, 16)]))
        assert cache.addresses([part], (1 << 20,), (1 << 30,)).tolist() == [
            (1 << 20) + offset,
            1 << 30,
        ]


def test_copy_that_is_too_large_is_refused() -> None:
    rows = np.array([MAX_COUNT], dtype=np.int64)
    huge = pieces([(0, 0, 16)], Stride(16, 16))._replace(rows=rows)
    with pytest.raises(InputError, match="copy fewer tokens"):
        table_of([a_job(huge)], AddressCache(), allocate)


def test_empty_copy_has_no_launch() -> None:
    table = table_of([GpuCopy(Binding(()), (), ())], AddressCache(), allocate)
    assert table.launches == ()
    assert len(table.numbers) == 0


def test_a_large_job_starts_before_the_table_of_the_others_is_made() -> None:
    small, large = a_job(pieces([(0, 0, 4096)])), a_job(pieces([(0, 0, LARGE_BYTES)]))
    assert batches([small, large, small]) == [[small, large, small]]
    assert batches([large, small, small]) == [[large], [small, small]]
    assert batches([large, small]) == [[large, small]]
    assert batches([large]) == [[large]]
    assert batches([]) == [[]]


def pieces(segments: list[tuple[int, int, int]], row_stride: Stride = NO_STRIDE) -> Pieces:
    """Return single pieces, each given by source offset, target offset and length."""
    source, target, lengths = np.array(segments, dtype=np.int64).T
    ones = np.ones(len(segments), dtype=np.int64)
    return Pieces(source, target, lengths, ones, ones, row_stride, NO_STRIDE, whole_pages=False)


def a_job(its: Pieces, source: int = 1 << 20, target: int = 1 << 30) -> GpuCopy:
    base = (Base(0, 0, 0),)
    return GpuCopy(Binding((BindingPart("kv", "k", base, base, its),)), (source,), (target,))
