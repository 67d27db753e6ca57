"""Tests of the CPU copy against the reference copy, with guard bytes around each region."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moving import Bytes, Rank, expected, filled, make_ranks, random_cache

from kvferry.errors import InputError
from kvferry.layout import DType, Layout, Order, Parallel, attention
from kvferry.memory.copy.cpu import copy_binding, warm_up
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import Binding, Plan, RankPair, Request, StagingView, bind, reshard
from kvferry.plan.bind import BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.testing.strategies import MAX_TOKENS, pairs

GUARD = 0xA5
GUARD_BYTES = 192
LINE = 64


class Guarded:
    """A copy of some bytes at a given offset in a cache line, with guard bytes around it."""

    def __init__(self, content: Bytes, shift: int, guard: int) -> None:
        self._whole = np.full(len(content) + 2 * GUARD_BYTES + 2 * LINE, guard, dtype=np.uint8)
        self._first = GUARD_BYTES + (shift - self._whole.ctypes.data - GUARD_BYTES) % LINE
        self.bytes = self._whole[self._first : self._first + len(content)]
        self.bytes[:] = content
        self.address = self._whole.ctypes.data + self._first  # also where there are no bytes

    def check(self) -> None:
        """Nobody wrote beside it."""
        assert (self._whole[: self._first] == self._whole[0]).all()
        assert (self._whole[self._first + len(self.bytes) :] == self._whole[0]).all()


class Way(NamedTuple):
    """How to copy: offsets of both sides in a cache line, and ``keep``."""

    source_shift: int
    target_shift: int
    keep: bool


def ways() -> st.SearchStrategy[Way]:
    shifts = st.sampled_from([0, 0, 16, 1, 63])
    return st.builds(Way, shifts, shifts, st.booleans())


def assert_copies(
    binding: Binding, sources: list[Bytes], targets: list[Bytes], way: Way
) -> list[Bytes]:
    """Copy guarded copies of the regions, and return the targets."""
    ours = [Guarded(region, way.source_shift, 0x5A) for region in sources]
    theirs = [Guarded(region, way.target_shift, GUARD) for region in targets]
    wanted = [region.copy() for region in targets]
    copy_pieces(binding.descriptors(), sources, wanted)
    addresses = [[region.address for region in side] for side in (ours, theirs)]
    copy_binding(binding, *addresses, keep=way.keep)
    for got, want in zip(theirs, wanted, strict=True):
        got.check()
        np.testing.assert_array_equal(got.bytes, want)
    for region, original in zip(ours, sources, strict=True):
        np.testing.assert_array_equal(region.bytes, original)
    return [region.bytes for region in theirs]


def move(plan: Plan, request: Request, source: Rank, target: Rank, way: Way, staged: bool) -> Rank:
    """Copy what one rank sends another, and return the target."""
    pair = RankPair(source.rank, target.rank)
    if not staged:
        direct = bind(plan, pair, request, source.side, target.side)
        return target._replace(regions=assert_copies(direct, source.regions, target.regions, way))
    gather = bind(plan, pair, request, source.side, StagingView())
    scatter = bind(plan, pair, request, StagingView(), target.side)
    slot = np.full(gather.num_bytes, GUARD, dtype=np.uint8)
    (slot,) = assert_copies(gather, source.regions, [slot], way)
    return target._replace(regions=assert_copies(scatter, [slot], target.regions, way))


def assert_moves(plan: Plan, request: Request, way: Way, staged: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = random_cache(plan.spec, request.num_tokens, rng)
    sources = filled(plan.source, cache, request, rng)
    targets = make_ranks(plan.target, request.num_tokens, rng)
    wanted = expected(targets, cache, request)
    for empty, regions in zip(targets, wanted, strict=True):
        target = empty
        for source in sources:
            if not plan.between(source.rank, target.rank):
                continue
            target = move(plan, request, source, target, way, staged)
        for got, want in zip(target.regions, regions, strict=True):
            np.testing.assert_array_equal(got, want)


@settings(max_examples=50, deadline=None)
@given(pairs(), st.integers(0, MAX_TOKENS), ways(), st.booleans(), st.integers(0, 9))
def test_any_layout_to_any_layout(
    pair: tuple[Layout, Layout], tokens: int, way: Way, staged: bool, seed: int
) -> None:
    assert_moves(reshard(*pair), Request(tokens), way, staged, seed)


def layouts(dtype: DType, head_dim: int, order: Order) -> st.SearchStrategy[Layout]:
    """Layouts with the element widths of real models."""
    spec = attention(layers=2, kv_heads=4, head_dim=head_dim, v_head_dim=head_dim + 1, dtype=dtype)
    return st.builds(
        lambda tp, page: Layout(spec, Parallel(tp=tp), page_tokens=page, order=order),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 3, 16, 64]),
    )


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("orders", list(itertools.product(Order, Order)))
@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(list(DType)), ways(), st.integers(0, 9))
def test_every_dtype_head_dim_page_size_and_order(
    orders: tuple[Order, Order],
    staged: bool,
    data: st.DataObject,
    dtype: DType,
    way: Way,
    seed: int,
) -> None:
    head_dim = data.draw(st.sampled_from([1, 17, 63, 64, 80, 127, 128, 255, 576]))
    source, target = (data.draw(layouts(dtype, head_dim, order)) for order in orders)
    tokens = data.draw(st.integers(1, 70))
    assert_moves(reshard(source, target), Request(tokens), way, staged, seed)


# ---------------------------------------------------------------- grids of any shape


Segment = tuple[int, int, int]


def grid(at: list[Stride], segments: list[Segment], row: Stride, col: Stride) -> Pieces:
    """Return pieces from segments of (length, rows, cols)."""
    table = np.array([(*place, *segment) for place, segment in zip(at, segments, strict=True)])
    source, target, lengths, rows, cols = table.reshape(-1, 5).astype(np.int64).T.copy()
    return Pieces(source, target, lengths, rows, cols, row, col, whole_pages=False)


class Spacing(NamedTuple):
    """How one side stores a segment's pieces: by rows or by columns, with gaps."""

    by_cols: bool = False
    gap: int = 0

    def strides(self, segments: list[Segment]) -> tuple[int, int, int]:
        """Bytes between rows, between columns and between segments that fit the largest."""
        length, rows, cols = (max(numbers, default=0) for numbers in zip(*segments, strict=True))
        inner = length + self.gap
        outer = inner * (rows if self.by_cols else cols) + self.gap
        row, col = (inner, outer) if self.by_cols else (outer, inner)
        return row, col, rows * cols * inner + (rows + cols) * self.gap


def part(segments: list[Segment], source: Spacing, target: Spacing, num_layers: int) -> BindingPart:
    """Return a part with segments in order in the target, and reversed in the source."""
    row, col, step = (
        Stride(*ours) for ours in zip(*[s.strides(segments) for s in (source, target)], strict=True)
    )
    last = len(segments) - 1
    at = [Stride((last - i) * step.source, i * step.target) for i in range(len(segments))]
    bases = [
        tuple(Base(layer, 0, layer * len(segments) * num_bytes) for layer in range(num_layers))
        for num_bytes in step
    ]
    return BindingPart("kv", "k", bases[0], bases[1], grid(at, segments, row, col))


def region_bytes(segments: list[Segment], spacing: Spacing, num_layers: int) -> int:
    return num_layers * len(segments) * spacing.strides(segments)[2]


def lengths() -> st.SearchStrategy[int]:
    """Lengths around every size at which the copy changes its method."""
    edges = [0, 1, 15, 64, 128, 256, 512, 1024, 1152, 4096, 4352, 8192, 10000]
    return st.sampled_from(edges).flatmap(lambda n: st.integers(max(0, n - 1), n + 1)) | (
        st.sampled_from(edges)
    )


def spacings() -> st.SearchStrategy[Spacing]:
    return st.builds(Spacing, st.booleans(), st.sampled_from([0, 0, 1, 16, 64, 256]))


ROWS = Spacing()
SEGMENT = st.tuples(lengths(), st.integers(0, 5), st.integers(0, 3))


@settings(max_examples=250, deadline=None)
@given(st.lists(SEGMENT, min_size=1, max_size=4), spacings(), spacings(), st.integers(1, 3), ways())
@example([(512, 16, 1), (512, 3, 1), (512, 16, 1)], Spacing(gap=512), ROWS, 2, Way(0, 0, False))
@example([(256, 1, 1)] * 40, ROWS, ROWS, 3, Way(0, 0, False))
@example([(512, 0, 1)], ROWS, ROWS, 1, Way(0, 16, False))
@example([(160, 16, 1), (160, 7, 1)], Spacing(gap=96), ROWS, 2, Way(1, 63, False))
@example([(4095, 3, 1), (4095, 2, 1)], Spacing(gap=1), ROWS, 2, Way(16, 16, False))
@example([(258, 3, 2)], ROWS, Spacing(by_cols=True), 1, Way(0, 0, False))
@example([(256, 3, 4)], ROWS, Spacing(gap=16), 1, Way(0, 0, False))
def test_any_grid_of_pieces(
    segments: list[Segment], source: Spacing, target: Spacing, num_layers: int, way: Way
) -> None:
    one = part(segments, source, target, num_layers)
    rng = np.random.default_rng(len(segments))
    ours = rng.integers(0, 256, region_bytes(segments, source, num_layers), dtype=np.uint8)
    theirs = np.zeros(region_bytes(segments, target, num_layers), dtype=np.uint8)
    assert_copies(Binding((one, one)), [ours], [theirs], way)


def test_several_regions_and_nothing_to_do() -> None:
    copy_binding(Binding(()), [], [])
    one = part([(300, 2, 1)], ROWS, ROWS, 2)
    copy_binding(Binding((one._replace(source_bases=(), target_bases=()),)), [], [])
    nothing = one._replace(pieces=grid([], [], Stride(1, 1), Stride(1, 1)))
    copy_binding(Binding((nothing,)), [0], [0])
    swapped = one._replace(
        source_bases=(Base(0, 1, 0), Base(1, 0, 7)), target_bases=(Base(0, 0, 5), Base(1, 2, 0))
    )
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 256, 700, dtype=np.uint8) for _ in range(2)]
    targets = [np.zeros(700, dtype=np.uint8) for _ in range(3)]
    got = assert_copies(Binding((swapped,)), sources, targets, Way(0, 0, False))
    np.testing.assert_array_equal(got[2][:600], sources[0][7:607])
    assert not got[1].any()


def test_offsets_are_64_bit() -> None:
    """Pages beyond 4 GiB of a region that is mostly not backed by memory."""
    far = (5 << 30) - 8192
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, 5 << 30, flags=flags) as memory:
        region = np.frombuffer(memory, dtype=np.uint8)
        region[far : far + 512] = 7
        one = part([(512, 1, 1)], ROWS, ROWS, 1)
        for source, target in ((far, 1 << 32), (1 << 32, far + 4096)):
            bases = (Base(0, 0, source),), (Base(0, 0, target),)
            copy_binding(
                Binding((BindingPart("kv", "k", *bases, one.pieces),)), *[[region.ctypes.data]] * 2
            )
        assert (region[far + 4096 : far + 4096 + 512] == 7).all()
        assert not region[far + 4096 + 512 :].any()
        del region


@pytest.mark.parametrize("segment", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_numbers_are_refused_and_nothing_is_copied(segment: Segment) -> None:
    pieces = grid([Stride(0, 0)], [segment], Stride(1, 1), Stride(1, 1))
    one = BindingPart("kv", "k", (Base(0, 0, 0),), (Base(0, 0, 0),), pieces)
    source, target = np.ones(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    with pytest.raises(InputError, match=r"kv\.k has a negative"):
        copy_binding(Binding((one,)), [source.ctypes.data], [target.ctypes.data])
    assert not target.any()


# ---------------------------------------------------------------- threads and processes


def test_other_threads_run_while_it_copies() -> None:
    """A long call that copies the same piece many times releases the GIL."""
    warm_up()
    source, target = np.ones(1 << 16, dtype=np.uint8), np.zeros(1 << 16, dtype=np.uint8)
    pieces = grid([Stride(0, 0)], [(1 << 16, 120_000, 1)], Stride(0, 0), Stride(0, 0))
    one = BindingPart("kv", "k", (Base(0, 0, 0),), (Base(0, 0, 0),), pieces)
    addresses = [source.ctypes.data], [target.ctypes.data]
    spans: list[float] = []

    def work() -> None:
        spans.append(time.monotonic())
        copy_binding(Binding((one,)), *addresses)
        spans.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.monotonic())
        thread.join(0.002)
    during = [tick for tick in ticks if spans[0] < tick < spans[1]]
    assert len(during) >= 5, f"the interpreter was held for {spans[1] - spans[0]:.3f} s"
    assert target.all()


CHECK = """
import numpy as np
from kvferry.memory.copy.cpu import copy_binding, warm_up
from kvferry.plan import PageTable, RankPair, Request, PagedView, StagingView, bind
from kvferry.plan import contiguous_pools, reshard
from kvferry.layout import Layout, attention
layout = Layout(attention(layers=1, kv_heads=1, head_dim=128))
pools = contiguous_pools(layout, 0, 2)
side = PagedView(pools.map, {"kv": PageTable([1])})
binding = bind(reshard(layout, layout), RankPair(0, 0), Request(16), side, StagingView())
source = [np.arange(size, dtype=np.uint8) for size in pools.region_bytes]
slot = np.zeros(binding.num_bytes, dtype=np.uint8)
warm_up()
copy_binding(binding, [region.ctypes.data for region in source], [slot.ctypes.data])
assert (slot == np.concatenate([region[len(region) // 2:] for region in source])).all()
print("copied")
"""
BOUND_S = 240


def start(package: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHECK],
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out.strip()) == (0, "copied"), err


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """Return a package folder in which numba cannot write its cache, even as root."""
    shutil.copytree(
        Path(__file__).parents[3] / "src",
        tmp_path / "src",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "src" / "kvferry" / "memory" / "copy" / "__pycache__").write_text("in the way")
    return tmp_path / "src"


def test_processes_that_compile_at_once_share_a_cache(unwritable: Path, tmp_path: Path) -> None:
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    for process in [start(unwritable, **caches) for _ in range(2)]:
        finish(process)
    code = list(tmp_path.rglob("*.nbc"))
    assert len(code) == 1, "one file, although two wrote it"
    written = code[0].stat().st_mtime_ns
    finish(start(unwritable, **caches))
    assert code[0].stat().st_mtime_ns == written, "it was found and not compiled again"


def test_copy_works_without_a_cache_folder(unwritable: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("in the way")
    finish(start(unwritable, XDG_CACHE_HOME=str(blocked), HOME=str(blocked)))
    assert not list(tmp_path.rglob("*.nbc"))


def test_import_does_not_import_numba() -> None:
    code = "import sys, kvferry.memory.copy.cpu; print({'numba', 'llvmlite'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, check=False, timeout=BOUND_S)
    assert told.stdout == b"set()\n", told.stderr
