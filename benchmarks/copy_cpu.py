"""Throughput of CPU copies of bound pieces, compared with a plain memcpy of the same bytes.

    .venv/bin/python benchmarks/copy_cpu.py [--mib 128] [--repeat 9] [--only translate]

Fragmented pages, 16 layers, K and V. Each case is compared with the reference copy, then timed in
alternation with the memcpy. ``split`` and ``join`` copy from pages to pages, from one rank to
several or back; ``gather`` and ``scatter`` have one contiguous side. ``translate`` copies between
pages of token rows and pages that keep K by columns, element by element. Slots of several sizes
follow, reused in turn, alone and with a copy out of the slot after each gather. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry.layout import DType, Layout, Order, Parallel, Span, attention
from kvferry.memory.copy.cpu import copy_binding, warm_up
from kvferry.memory.copy.reference import copy_pieces
from kvferry.memory.staging import SlotPool, allocate
from kvferry.plan import (
    Binding,
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    StagingView,
    bind,
    contiguous_pools,
    reshard,
)

MIB = 1 << 20
LAYERS, PAGE, HEAD_BYTES = 16, 16, 256
# By piece size in bytes: KV heads of the model, and ranks that share them.
SHAPES = {256: (8, 8), 512: (8, 4), 1024: (8, 2), 4096: (32, 2), 32768: (8, 1)}
SLOT_MIB = (0.5, 1, 2, 4, 8)
SLOTS_IN_TURN = 4

Bytes = NDArray[np.uint8]


class Memory(NamedTuple):
    """One side's regions, or a slot."""

    side: PagedView | StagingView
    regions: list[Bytes]

    @property
    def addresses(self) -> list[int]:
        return [region.ctypes.data for region in self.regions]


def memory(num_bytes: int, *, shift: int = 0, filled: bool = False) -> Bytes:
    """Return memory that begins ``shift`` bytes after a cache line; filled words all differ."""
    owner = allocate(num_bytes + 64).owner
    assert isinstance(owner, np.ndarray)
    array: Bytes = owner[shift : shift + num_bytes]
    if filled:
        words = array[: num_bytes // 8 * 8].view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return array


def pages(layout: Layout, num_tokens: int, seed: int, *, filled: bool, shift: int) -> Memory:
    """Return a rank whose pools are half full, with the request's pages in random order."""
    num_pages = 2 * (num_tokens // layout.page_tokens)
    pools = contiguous_pools(layout, 0, num_pages)
    table = PageTable(np.random.default_rng(seed).permutation(num_pages)[: num_pages // 2])
    regions = [memory(size, shift=shift, filled=filled) for size in pools.region_bytes]
    return Memory(PagedView(pools.map, {"kv": table}), regions)


def layouts(piece_bytes: int) -> tuple[Layout, Layout]:
    """Return the layouts of one rank with every head, and of several that share them."""
    heads, tp = SHAPES[piece_bytes]
    spec = attention(layers=LAYERS, kv_heads=heads, head_dim=HEAD_BYTES // 2)
    return Layout(spec, page_tokens=PAGE), Layout(spec, Parallel(tp=tp), page_tokens=PAGE)


def tokens_for(piece_bytes: int, payload_bytes: int) -> int:
    heads, tp = SHAPES[piece_bytes]
    token_bytes = 2 * LAYERS * heads // tp * HEAD_BYTES
    return payload_bytes // token_bytes // PAGE * PAGE


class Case(NamedTuple):
    name: str
    binding: Binding
    source: Memory
    target: Memory
    keep: bool = False

    def copy(self) -> None:
        copy_binding(self.binding, self.source.addresses, self.target.addresses, keep=self.keep)

    def verify(self) -> None:
        """Check that the copy writes the same bytes as the reference and nothing else."""
        wanted = [region.copy() for region in self.target.regions]
        copy_pieces(self.binding.descriptors(), self.source.regions, wanted)
        self.copy()
        for got, want in zip(self.target.regions, wanted, strict=True):
            if not np.array_equal(got, want):
                raise SystemExit(f"{self.name}: the copy is wrong")


def cases(piece_bytes: int, payload_bytes: int, shift: int) -> Iterator[Case]:
    whole, part = layouts(piece_bytes)
    num_tokens = tokens_for(piece_bytes, payload_bytes)
    request, pair = Request(num_tokens), RankPair(0, 0)
    split, join = reshard(whole, part), reshard(part, whole)

    def full(layout: Layout) -> Memory:
        return pages(layout, num_tokens, 1, filled=True, shift=shift)

    def empty(layout: Layout) -> Memory:
        return pages(layout, num_tokens, 2, filled=False, shift=shift)

    def between(name: str, plan: Plan, source: Memory, target: Memory) -> Case:
        return Case(name, bind(plan, pair, request, source.side, target.side), source, target)

    num_bytes = split.payload_bytes(request) // part.num_ranks
    source = full(whole)
    yield between("split", split, source, empty(part))
    yield between("gather", split, source, Memory(StagingView(), [memory(num_bytes)]))
    del source
    target = empty(whole)
    yield between("scatter", join, Memory(StagingView(), [memory(num_bytes, filled=True)]), target)
    yield between("join", join, full(part), target)


def translations(dtype: DType) -> Iterator[Case]:
    """Return copies from rows of K to columns and back, of V to rows."""
    spec = attention(layers=LAYERS, kv_heads=8, head_dim=128, dtype=dtype)
    rows = Layout(spec, page_tokens=PAGE)
    columns = Layout(spec, page_tokens=2 * PAGE, order=Order.HND, transposed=("kv.k",))
    # Little, because the reference copies an element at a time.
    num_tokens = 16 * MIB // (2 * LAYERS * 8 * 128 * dtype.num_bytes)
    request, pair = Request(num_tokens), RankPair(0, 0)
    for name, source, target in (("to columns", rows, columns), ("to rows", columns, rows)):
        full = pages(source, num_tokens, 1, filled=True, shift=0)
        empty = pages(target, num_tokens, 2, filled=False, shift=0)
        binding = bind(reshard(source, target), pair, request, full.side, empty.side)
        yield Case(f"translate {name}", binding, full, empty)


def in_turns(repeat: int, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each, measured alternately so that noise affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in times.items()}


def plain(num_bytes: int) -> Callable[[], Any]:
    """Return a memcpy by the C library between two new buffers."""
    source, target = memory(num_bytes, filled=True), memory(num_bytes)
    target[:] = 0
    return lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, num_bytes)


def copy_row(case: Case, piece_bytes: int, shift: int, repeat: int) -> dict[str, Any]:
    case.verify()
    num_bytes = case.binding.num_bytes
    seconds = in_turns(repeat, {"memcpy": plain(num_bytes), "copy": case.copy})
    row = {
        "case": case.name,
        "piece_bytes": piece_bytes,
        "shift": shift,
        "bytes": num_bytes,
        "pieces": case.binding.num_pieces,
        "gb_per_s": round(num_bytes / seconds["copy"] / 1e9, 2),
        "memcpy_gb_per_s": round(num_bytes / seconds["memcpy"] / 1e9, 2),
        "ratio": round(seconds["memcpy"] / seconds["copy"], 2),
    }
    print(
        f"{case.name:20} {piece_bytes:6} B at +{shift:<2} {row['gb_per_s']:6.2f} GB/s, memcpy "
        f"{row['memcpy_gb_per_s']:6.2f}: {row['ratio']:.2f}",
        flush=True,
    )
    return row


def slot_row(piece_bytes: int, slot_mib: float, payload: int, repeat: int) -> dict[str, Any]:
    """Gather a request slot by slot with both kinds of store, with and without a copy out."""
    whole, part = layouts(piece_bytes)
    num_tokens = tokens_for(piece_bytes, payload)
    plan, request, pair = reshard(whole, part), Request(num_tokens), RankPair(0, 0)
    source = pages(whole, num_tokens, 1, filled=True, shift=0)
    (block,) = plan.blocks(*pair, request)
    pool = SlotPool(int(slot_mib * MIB), SLOTS_IN_TURN)
    step = tokens_for(piece_bytes, pool.slot_bytes)
    bindings = [
        bind(
            plan, pair, request, source.side, StagingView(), [replace(block, tokens=Span(at, end))]
        )
        for at in range(0, num_tokens, step)
        for end in [min(at + step, num_tokens)]
    ]
    staging = [memory(pool.num_bytes) for _ in range(2)]
    slots, copies = (array.ctypes.data for array in staging)
    regions = source.addresses

    def gather(keep: bool, send: bool) -> None:
        for index, binding in enumerate(bindings):
            offset = pool.offset(index % pool.num_slots)
            copy_binding(binding, regions, [slots + offset], keep=keep)
            if send:
                ctypes.memmove(copies + offset, slots + offset, binding.num_bytes)

    works: dict[str, Callable[[], Any]] = {"memcpy": plain(payload)}
    for keep in (True, False):
        for send in (False, True):
            name = ("kept" if keep else "past") + ("_sent" if send else "")
            works[name] = partial(gather, keep, send)
    seconds = in_turns(repeat, works)
    ratios = {name: round(seconds["memcpy"] / s, 2) for name, s in seconds.items()}
    del ratios["memcpy"]
    print(f"slot {slot_mib:4} MiB, {piece_bytes:5} B: {ratios}", flush=True)
    return {"slot_mib": slot_mib, "piece_bytes": piece_bytes, **ratios}


def small_call() -> float:
    """Return the microseconds of a copy of one token in 16 layers, K and V."""
    whole, part = layouts(512)
    source, target = (pages(layout, PAGE, 1, filled=True, shift=0) for layout in (whole, part))
    binding = bind(reshard(whole, part), RankPair(0, 0), Request(1), source.side, target.side)
    case = Case("small", binding, source, target)
    case.verify()
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(1000):
            case.copy()
        times.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=128, help="payload of each case")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--only", choices=["translate"], help="leave out the other cases")
    options = parser.parse_args()
    payload = options.mib * MIB
    warm_up_s = warm_up()
    translated = [
        copy_row(case, dtype.num_bytes, 0, options.repeat)
        for dtype in (DType.BFLOAT16, DType.FLOAT32)
        for case in translations(dtype)
    ]
    if options.only:
        print(json.dumps({"warm_up_s": round(warm_up_s, 2), "translated": translated}))
        return
    small_us = small_call()
    print(f"warm-up {warm_up_s:.2f} s, a call with 32 pieces {small_us} µs")
    copies = [
        copy_row(case, piece_bytes, shift, options.repeat)
        for piece_bytes, shift in [*((size, 0) for size in SHAPES), (512, 16)]
        for case in cases(piece_bytes, payload, shift)
    ]
    slots = [
        slot_row(piece_bytes, slot_mib, payload, options.repeat)
        for piece_bytes in (512, 1024)
        for slot_mib in SLOT_MIB
    ]
    document = {"warm_up_s": round(warm_up_s, 2), "small_us": small_us, "copies": copies}
    print(json.dumps(document | {"slots": slots, "translated": translated}))


if __name__ == "__main__":
    main()
