"""Throughput of a GPU's checksums of pages, compared with a plain copy of the same bytes.

    python benchmarks/checksum_gpu.py [--repeats 20] [--only tp1]

Each case sums everything that one rank sends another, as a proof of content does. The host measures
it from the first step to the result, with a new page table every time. ``on GPU`` is the time of
the kernels alone, by the GPU's clock. ``host`` is the time that the calling thread spends, which
never waits for the GPU. The plain copy is timed alternately in the same run. The sums are compared
with those of the CPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from kvferry.layout import (
    CacheSpec,
    DType,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    Tensor,
    attention,
)
from kvferry.memory.checksum.cpu import CellSums
from kvferry.memory.checksum.gpu import GpuCellSums, GpuSummer
from kvferry.memory.checksum.gpu_tables import tiles_of
from kvferry.plan import PageTable, Plan, RankPair, Request, contiguous_pools, reshard
from kvferry.plan.content import (
    ALL_CELLS,
    ContentView,
    ProofRequest,
    cell_entries,
    cells_between,
    num_chosen,
)
from kvferry.regions import Device

PROOF = ProofRequest(12345, ALL_CELLS)
HEADS = attention(layers=64, kv_heads=8, head_dim=128)
LATENT = CacheSpec(
    61, (Group("c", Paged(), tuple(range(61)), 1, (Tensor("c", DType.BFLOAT16, 576),)),)
)


class Case(NamedTuple):
    """One rank's layout, its peer's, and the tokens of a request."""

    name: str
    source: Layout
    target: Layout
    num_tokens: int


def cases() -> list[Case]:
    """Return the cases."""
    tp1, tp4 = (Layout(HEADS, Parallel(tp=tp), page_tokens=64) for tp in (1, 4))
    columns = Layout(HEADS, Parallel(tp=1), page_tokens=16, order=Order.HND)
    latent = Layout(LATENT, Parallel(tp=1), page_tokens=64)
    small = Layout(attention(layers=32, kv_heads=8, head_dim=128), page_tokens=16)
    return [
        Case("tp4-to-tp1, one rank", tp4, tp1, 8192),
        Case("tp1-to-tp1", tp1, tp1, 8192),
        Case("tp1-to-tp1, 1000 tokens", tp1, tp1, 1000),
        Case("tp1-hnd, pages of 16", columns, tp1, 8192),
        Case("latent", latent, latent, 8192),
        Case("one page of 16", small, small, 16),
    ]


class Pages:
    """A rank's pools on the GPU, with random bytes, and page tables of a request."""

    def __init__(self, case: Case) -> None:
        self.plan: Plan = reshard(case.source, case.target)
        self.layout, self.request = case.source, Request(case.num_tokens)
        self.num_pages = -(-case.num_tokens // case.source.page_tokens)
        pools = contiguous_pools(case.source, 0, 2 * self.num_pages)
        self.map = pools.map
        self.memory = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            for size in pools.region_bytes
        ]
        torch.cuda.synchronize()
        addresses = tuple(one.data_ptr() for one in self.memory)
        tiles = tiles_of(self.map, self.layout.spec, addresses)
        self.summer = GpuSummer(Device("cuda"), addresses, tiles)
        self.rng = np.random.default_rng(1)
        self.shuffle()

    def shuffle(self) -> None:
        """Give the request other pages."""
        names = [group.name for group in self.layout.spec.groups]
        pages = self.rng.permutation(2 * self.num_pages)[: self.num_pages]
        self.tables = {name: PageTable(pages) for name in names}

    def entries(self) -> tuple[int, Any]:
        """Return the number of cells and their entries."""
        about = self.plan, RankPair(0, 0), self.request, PROOF
        view = ContentView(self.layout, self.layout.rank_shards(0), self.map, self.tables)
        return num_chosen(cells_between(*about)), cell_entries(*about, view)

    def gpu_sums(self) -> GpuCellSums:
        """Return sums of which nothing is queued yet."""
        return self.summer.sum_cells(PROOF.seed, *self.entries())

    def cpu_sums(self) -> bytes:
        """Return the sums that the CPU computes."""
        regions = [one.cpu().numpy() for one in self.memory]
        cells, entries = self.entries()
        return CellSums(PROOF.seed, cells, entries, [one.ctypes.data for one in regions]).finish()

    @property
    def num_bytes(self) -> int:
        """Bytes of the request that are summed."""
        return sum(self.plan.bytes_of(one, self.request) for one in self.plan.between(0, 0))


def timed(pages: Pages) -> tuple[float, float, float, bytes]:
    """Sum once. Return seconds to the result, of the calling thread, and on the GPU."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    sums = pages.gpu_sums()
    first.record(pages.summer.stream)
    while sums.step():
        pass
    last.record(pages.summer.stream)
    queued = time.perf_counter()
    last.synchronize()
    result = sums.result
    end = time.perf_counter()
    return end - begin, queued - begin, first.elapsed_time(last) / 1e3, result


def copy_s(num_bytes: int) -> float:
    """Return how long a plain copy takes on the GPU."""
    one, two = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    two.copy_(one)
    first.record()
    two.copy_(one)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Measure one case and verify its sums."""
    pages = Pages(case)
    verified = timed(pages)[3] == pages.cpu_sums()
    rows, copies = [], []
    for _ in range(repeats):
        pages.shuffle()
        copies.append(copy_s(pages.num_bytes))
        rows.append(timed(pages)[:3])
    total, host, on_gpu = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "case": case.name,
        "bytes": pages.num_bytes,
        "milliseconds": total * 1e3,
        "host_milliseconds": host * 1e3,
        "on_gpu_milliseconds": on_gpu * 1e3,
        "on_gpu_gb_per_s": pages.num_bytes / on_gpu / 1e9,
        "copy_milliseconds": statistics.median(copies) * 1e3,
        "verified": verified,
    }


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", action="append", help="cases whose name has this text")
    args = parser.parse_args()
    found = []
    for case in cases():
        if args.only and not any(text in case.name for text in args.only):
            continue
        one = measure(case, args.repeats)
        found.append(one)
        print(
            f"{one['case']:26} {one['bytes'] / 1e6:7.1f} MB  {one['milliseconds']:7.3f} ms "
            f"(host {one['host_milliseconds']:.3f}, on GPU {one['on_gpu_milliseconds']:.3f} ms = "
            f"{one['on_gpu_gb_per_s']:.0f} GB/s)  plain copy {one['copy_milliseconds']:.3f} ms  "
            f"{'verified' if one['verified'] else 'WRONG'}",
            flush=True,
        )
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cases": found}))
    if not all(one["verified"] for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
