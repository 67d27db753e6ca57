"""How fast a GPU gathers and scatters head slices, against a plain copy of the same bytes.

    python benchmarks/copy_gpu.py [--repeats 20]

One source rank's gather for all its targets, or one target rank's scatter from all its
sources, in a single call, as the host sees it: from the call to the end of its event, with
the tables built and uploaded anew for a fresh page table every time. The plain copy is
timed the same way in the same run, turn by turn. Bytes are compared with what indexing
by torch gives, and bytes outside the request's pages must be as they were. Ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from kvferry.copy.gpu import GpuCopier, Job
from kvferry.layout import Layout, Order, Parallel, attention
from kvferry.plan import (
    Image,
    PageTable,
    Pair,
    Plan,
    Request,
    Side,
    bind,
    contiguous_pools,
    reshard,
)
from kvferry.regions import Device

HEADS, HEAD_DIM, LAYERS = 8, 128, 64
UNIT_BYTES = 2 * HEAD_DIM
MARK = 0xEE


class Case(NamedTuple):
    """One direction of one resharding."""

    direction: str
    source_tp: int
    target_tp: int
    page_tokens: int = 64
    tokens: int = 8192
    order: Order = Order.NHD

    def __str__(self) -> str:
        return (
            f"{self.direction} TP{self.source_tp}→TP{self.target_tp}, page {self.page_tokens} "
            f"{self.order.upper()}, {self.tokens} tokens"
        )


# The first six are the ones that there is a target for.
CASES = (
    Case("gather", 4, 1),
    Case("scatter", 4, 1),
    Case("gather", 1, 4),
    Case("scatter", 1, 4),
    Case("gather", 2, 4),
    Case("scatter", 2, 4),
    Case("gather", 1, 4, order=Order.HND),
    Case("scatter", 4, 1, order=Order.HND),
    Case("gather", 1, 4, page_tokens=16),
    Case("gather", 1, 4, page_tokens=1),
    Case("scatter", 4, 1, page_tokens=1),
    Case("gather", 4, 1, tokens=64),
    Case("gather", 4, 1, tokens=1024),
    Case("scatter", 2, 1, tokens=128),
)


class Memory:
    """A rank's pools and its peers' slots, in GPU memory."""

    def __init__(self, case: Case) -> None:
        spec = attention(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
        source, target = (
            Layout(spec, Parallel(tp=tp), page_tokens=case.page_tokens, order=case.order)
            for tp in (case.source_tp, case.target_tp)
        )
        self.case = case
        self.plan: Plan = reshard(source, target)
        self.gathers = case.direction == "gather"
        self.layout = source if self.gathers else target
        self.request = Request(case.tokens)
        self.num_pages = 2 * (case.tokens // case.page_tokens)
        self.pools = contiguous_pools(self.layout, 0, self.num_pages)
        self.regions = [_bytes(size) for size in self.pools.region_bytes]
        self.addresses = tuple(region.data_ptr() for region in self.regions)
        peers = self.plan.targets_of(0) if self.gathers else self.plan.sources_of(0)
        self.pairs = [Pair(0, peer) if self.gathers else Pair(peer, 0) for peer in peers]
        self.slots = [_bytes(self.plan.bytes_of(self._move(pair), self.request))
                      for pair in self.pairs]  # fmt: skip

    def _move(self, pair: Pair) -> Any:
        (move,) = self.plan.between(*pair)
        return move

    def jobs(self, pages: np.ndarray[Any, Any]) -> list[Job]:
        """Bind the request to these pages, for all peers."""
        side, image = Side(self.pools.map, {"kv": PageTable(pages)}), Image()
        jobs = []
        for pair, slot in zip(self.pairs, self.slots, strict=True):
            if self.gathers:
                binding = bind(self.plan, pair, self.request, side, image)
                jobs.append(Job(binding, self.addresses, (slot.data_ptr(),)))
            else:
                binding = bind(self.plan, pair, self.request, image, side)
                jobs.append(Job(binding, (slot.data_ptr(),), self.addresses))
        return jobs

    def spoil(self) -> None:
        """Fill what will be written, so that nothing is right by chance."""
        for written in self.slots if self.gathers else self.regions:
            written.fill_(MARK)
        torch.cuda.synchronize()

    def verify(self, pages: np.ndarray[Any, Any]) -> bool:
        """Whether pools and slots agree, and no other page was written."""
        index = torch.from_numpy(pages).cuda()
        others = torch.ones(self.num_pages, dtype=torch.bool, device="cuda")
        others[index] = False
        return all(
            self._tensor_is_right(layer, tensor, index, others)
            for layer in range(LAYERS)
            for tensor in range(2)
        )

    def _tensor_is_right(
        self, layer: int, tensor: int, index: torch.Tensor, others: torch.Tensor
    ) -> bool:
        page = self.case.page_tokens
        pool = self.regions[tensor * LAYERS + layer].view(self.num_pages, -1, UNIT_BYTES)
        untouched = self.gathers or bool((pool[others] == MARK).all())
        if self.case.order is Order.NHD:
            tokens = pool[index].view(self.case.tokens, -1, UNIT_BYTES)
        else:
            by_head = pool[index].view(len(index), -1, page, UNIT_BYTES)
            tokens = by_head.transpose(1, 2).reshape(self.case.tokens, -1, UNIT_BYTES)
        for pair, slot in zip(self.pairs, self.slots, strict=True):
            move = self._move(pair)
            first = move.source_unit if self.gathers else move.target_unit
            mine = slot.view(LAYERS, 2, self.case.tokens, len(move.units), UNIT_BYTES)
            if not torch.equal(tokens[:, first : first + len(move.units)], mine[layer, tensor]):
                return False
        return untouched


def _bytes(size: int) -> torch.Tensor:
    """Random bytes in GPU memory."""
    words = torch.randint(-(2**62), 2**62, (-(-size // 8),), dtype=torch.int64, device="cuda")
    return words.view(torch.uint8)[:size]


class Times(NamedTuple):
    """Seconds of one turn: until the call returned, until its event, of a plain copy."""

    host: float
    total: float
    plain: float


def turn(copier: GpuCopier, jobs: list[Job], plain: list[torch.Tensor]) -> Times:
    """Time a call and a plain copy of as many bytes."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = copier.copy(jobs)
    queued = time.perf_counter()
    done.synchronize()
    end = time.perf_counter()
    plain[1].copy_(plain[0])
    torch.cuda.synchronize()
    return Times(queued - begin, end - begin, time.perf_counter() - end)


def measure(case: Case, copier: GpuCopier, repeats: int) -> dict[str, Any]:
    """Medians of one case, verified."""
    memory, rng = Memory(case), np.random.default_rng(7)
    num_bytes = sum(len(slot) for slot in memory.slots)
    plain = [_bytes(num_bytes), _bytes(num_bytes)]
    memory.spoil()
    pages = rng.permutation(memory.num_pages)[: memory.num_pages // 2]
    copier.copy(memory.jobs(pages)).synchronize()
    verified = memory.verify(pages)
    halves = (
        rng.permutation(memory.num_pages)[: memory.num_pages // 2] for _ in range(repeats + 3)
    )
    times = [turn(copier, jobs, plain) for jobs in [memory.jobs(pages) for pages in halves]]
    host, total, copy = (statistics.median(column) for column in zip(*times[3:], strict=True))
    return {
        "case": str(case),
        "bytes": num_bytes,
        "us": round(total * 1e6, 1),
        "host_us": round(host * 1e6, 1),
        "gb_per_s": round(num_bytes / total / 1e9),
        "plain_gb_per_s": round(num_bytes / copy / 1e9),
        "ratio": round(copy / total, 3),
        "verified": verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    copier = GpuCopier(Device("cuda"))
    begin = time.perf_counter()
    copier.warm_up()
    warm_up_s = time.perf_counter() - begin
    print(f"{'':48} {'MB':>6} {'GB/s':>6} {'plain':>6} {'ratio':>6} {'call µs':>8}")
    rows = []
    for case in CASES:
        row = measure(case, copier, repeats)
        rows.append(row)
        print(
            f"{row['case']:48} {row['bytes'] / 1e6:6.0f} {row['gb_per_s']:6} "
            f"{row['plain_gb_per_s']:6} {row['ratio']:6.3f} {row['host_us']:8.1f}"
            f"{'' if row['verified'] else '  WRONG BYTES'}",
            flush=True,
        )
    name = torch.cuda.get_device_name()
    print(json.dumps({"device": name, "repeats": repeats, "warm_up_s": round(warm_up_s, 2),
                      "copies": rows}))  # fmt: skip
    if not all(row["verified"] for row in rows):
        raise SystemExit("wrong bytes")


if __name__ == "__main__":
    main()
