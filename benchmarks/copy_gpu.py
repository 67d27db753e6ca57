"""Throughput of a GPU's gathers and scatters of head slices, compared with a plain copy.

    python benchmarks/copy_gpu.py [--repeats 20] [--only direct] [--only packed]

Each case is one call: a source rank's gather for all its targets, a target rank's scatter from all
its sources, or a source rank's copy straight into its targets' pages. The host measures it from the
call to the end of its event, with a new page table every time, so tables are built and uploaded.
The plain copy of the same bytes is timed alternately in the same run. ``on GPU`` is the ratio of
the kernels alone, by the GPU's clock, with the table already there. Bytes are compared with torch's
indexing, and bytes outside the request's pages must be unchanged. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
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
    Part,
    Tensor,
    attention,
)
from kvferry.memory.copy.gpu import GpuCopier, GpuCopy
from kvferry.plan import (
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
from kvferry.regions import Device

Pages = np.ndarray[Any, Any]
LAYERS = 64
MARK = 0xEE
# DeepSeek V3.2 in FP8.
PACKED = Tensor.composite(
    "latent",
    Part("values", DType.FLOAT8_E4M3, 512),
    Part("scales", DType.FLOAT32, 4),
    Part("rotary", DType.BFLOAT16, 64),
)


class Case(NamedTuple):
    """One direction of one resharding."""

    direction: str
    source_tp: int
    target_tp: int
    page_tokens: int = 64
    tokens: int = 8192
    order: Order = Order.NHD
    heads: int = 8
    head_dim: int = 128
    dtype: DType = DType.BFLOAT16
    # The source's TP ranks all share the tokens, this many in turn; 0 if each has all.
    interleave: int = 0
    # Latents in FP8 with their scales, instead of heads.
    is_packed: bool = False

    def __str__(self) -> str:
        shape = "packed latent" if self.is_packed else f"{self.heads}×{self.head_dim} {self.dtype}"
        source = f"DCP{self.source_tp} by {self.interleave}" if self.interleave else ""
        return (
            f"{self.direction} {source or f'TP{self.source_tp}'}→TP{self.target_tp}, page "
            f"{self.page_tokens} {self.order.upper()}, {shape}, {self.tokens} tokens"
        )

    @property
    def source(self) -> Parallel:
        """The sharding of the source."""
        if not self.interleave:
            return Parallel(tp=self.source_tp)
        return Parallel(tp=self.source_tp, dcp=self.source_tp, interleave=self.interleave)

    def positions(self, source: int) -> torch.Tensor:
        """Return the positions of a source's tokens."""
        every = torch.arange(self.tokens, device="cuda")
        if not self.interleave:
            return every
        return every[every // self.interleave % self.source_tp == source]

    @property
    def spec(self) -> CacheSpec:
        """The model's cache."""
        if self.is_packed:
            return CacheSpec(LAYERS, (Group("kv", Paged(), tuple(range(LAYERS)), 1, (PACKED,)),))
        return attention(
            layers=LAYERS, kv_heads=self.heads, head_dim=self.head_dim, dtype=self.dtype
        )

    @property
    def unit_bytes(self) -> int:
        """The bytes of K or V of one token and head."""
        return self.spec.groups[0].tensors[0].unit_bytes


# The first six have a target.
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
    # Straight into a peer's mapped pages.
    Case("direct", 4, 1),
    Case("direct", 1, 4),
    Case("direct", 2, 4),
    Case("direct", 1, 1),
    Case("direct", 4, 1, tokens=256),
    Case("direct", 1, 4, tokens=256),
    Case("direct", 4, 1, page_tokens=16),
    Case("direct", 1, 4, page_tokens=16),
    Case("direct", 1, 1, page_tokens=16),
    Case("direct", 4, 1, head_dim=64),
    Case("direct", 1, 4, head_dim=64),
    Case("direct", 1, 4, head_dim=64, page_tokens=16),
    Case("direct", 1, 1, heads=1, head_dim=576),
    Case("direct", 1, 1, heads=1, head_dim=576, page_tokens=16),
    Case("direct", 4, 1, dtype=DType.FLOAT8_E4M3),
    Case("direct", 1, 4, dtype=DType.FLOAT8_E4M3),
    Case("direct", 1, 1, dtype=DType.FLOAT8_E4M3, page_tokens=16),
    Case("gather", 1, 4, head_dim=64),
    Case("scatter", 4, 1, head_dim=64),
    Case("gather", 1, 4, dtype=DType.FLOAT8_E4M3),
    Case("gather", 1, 1, heads=1, head_dim=576),
    # Context parallelism: ranks that share the tokens of a latent, to ranks that have all.
    *(
        Case(direction, 8, 2, heads=1, head_dim=576, tokens=65536, interleave=interleave)
        for direction in ("direct", "gather", "scatter")
        for interleave in (64, 1)
    ),
    Case("direct", 1, 1, is_packed=True, tokens=32768),
    Case("direct", 1, 1, is_packed=True, tokens=32768, page_tokens=16),
    Case("gather", 1, 1, is_packed=True, tokens=32768),
    *(
        Case(direction, 8, 2, is_packed=True, tokens=65536, interleave=interleave)
        for direction in ("direct", "gather", "scatter")
        for interleave in (64, 1)
    ),
)


class Rank:
    """A rank's pools in GPU memory."""

    def __init__(self, layout: Layout, rank: int, case: Case) -> None:
        self.case = case
        self.num_pages = 2 * (case.tokens // case.page_tokens)
        self.pools = contiguous_pools(layout, rank, self.num_pages)
        self.regions = [_bytes(size) for size in self.pools.region_bytes]
        self.addresses = tuple(region.data_ptr() for region in self.regions)

    def side(self, pages: Pages) -> PagedView:
        """Return the side of a request in these pages."""
        return PagedView(self.pools.map, {"kv": PageTable(pages)})

    def tokens(self, layer: int, tensor: int, pages: Pages) -> torch.Tensor:
        """Return the request's tokens of one tensor as [tokens, heads, bytes]."""
        pool = self.regions[tensor * LAYERS + layer].view(self.num_pages, -1, self.case.unit_bytes)
        index, shape = torch.from_numpy(pages).cuda(), (self.case.tokens, -1, self.case.unit_bytes)
        if self.case.order is Order.NHD:
            return pool[index].view(shape)
        by_head = pool[index].view(len(index), -1, self.case.page_tokens, self.case.unit_bytes)
        return by_head.transpose(1, 2).reshape(shape)

    def untouched(self, pages: Pages) -> bool:
        """Return whether all other pages are unchanged."""
        others = torch.ones(self.num_pages, dtype=torch.bool, device="cuda")
        others[torch.from_numpy(pages).cuda()] = False
        views = (region.view(self.num_pages, -1)[others] for region in self.regions)
        return all(bool((view == MARK).all()) for view in views)


class Slot:
    """A staging slot in GPU memory."""

    def __init__(self, num_bytes: int, num_units: int, case: Case) -> None:
        self.case = case
        self.num_units = num_units
        self.regions = [_bytes(num_bytes)]
        self.addresses = (self.regions[0].data_ptr(),)

    def side(self, pages: Pages) -> StagingView:
        """Return the view of a slot, which does not depend on pages."""
        return StagingView()

    def tokens(self, layer: int, tensor: int, pages: Pages) -> torch.Tensor:
        """Return the tokens of one tensor as [tokens, heads, bytes]."""
        shape = (LAYERS, len(self.case.spec.groups[0].tensors), -1, self.num_units,
                 self.case.unit_bytes)  # fmt: skip
        return self.regions[0].view(shape)[layer, tensor]

    def untouched(self, pages: Pages) -> bool:
        """Return True: a slot has nothing else."""
        return True


class Memory:
    """One rank and its peers: other ranks' pools, or slots."""

    def __init__(self, case: Case) -> None:
        source, target = (
            Layout(case.spec, side, page_tokens=case.page_tokens, order=case.order)
            for side in (case.source, Parallel(tp=case.target_tp))
        )
        self.case = case
        self.plan: Plan = reshard(source, target)
        self.request = Request(case.tokens)
        self.sends = case.direction != "scatter"
        self.num_pages = 2 * (case.tokens // case.page_tokens)
        self.rank = Rank(source if self.sends else target, 0, case)
        ranks = self.plan.targets_of(0) if self.sends else self.plan.sources_of(0)
        self.pairs = [RankPair(0, peer) if self.sends else RankPair(peer, 0) for peer in ranks]
        self.peers: list[Rank | Slot] = [
            Rank(target, pair.target, case) if case.direction == "direct" else self._slot(pair)
            for pair in self.pairs
        ]
        self.num_bytes = sum(
            self.plan.bytes_of(self._move(pair), self.request) for pair in self.pairs
        )

    def _slot(self, pair: RankPair) -> Slot:
        move = self._move(pair)
        return Slot(self.plan.bytes_of(move, self.request), len(move.units), self.case)

    def _move(self, pair: RankPair) -> Any:
        (move,) = self.plan.between(*pair)
        return move

    def jobs(self, pages: Pages) -> list[GpuCopy]:
        """Return the copies of the request in these pages, one for each peer."""
        jobs = []
        # The rank has one table for all peers. The peers use the same pages in another order.
        own_side, peer_pages = self.rank.side(pages), pages[::-1].copy()
        for pair, peer in zip(self.pairs, self.peers, strict=True):
            sides = own_side, peer.side(peer_pages)
            ends = sides if self.sends else sides[::-1]
            binding = bind(self.plan, pair, self.request, *ends)
            addresses = self.rank.addresses, peer.addresses
            jobs.append(GpuCopy(binding, *(addresses if self.sends else addresses[::-1])))
        return jobs

    def spoil(self) -> None:
        """Overwrite the memory to be written, so that no byte is right by chance."""
        for one in self.peers if self.sends else [self.rank]:
            for region in one.regions:
                region.fill_(MARK)
        torch.cuda.synchronize()

    def verify(self, pages: Pages) -> bool:
        """Return whether both ends have the same bytes and no other page was written."""
        peer_pages = pages[::-1].copy()
        written = self.peers if self.sends else [self.rank]
        return all(one.untouched(peer_pages) for one in written) and all(
            self._is_right(pair, peer, layer, tensor, pages)
            for pair, peer in zip(self.pairs, self.peers, strict=True)
            for layer in range(LAYERS)
            for tensor in range(len(self.case.spec.groups[0].tensors))
        )

    def _is_right(
        self, pair: RankPair, peer: Rank | Slot, layer: int, tensor: int, pages: Pages
    ) -> bool:
        move = self._move(pair)
        mine = self.rank.tokens(layer, tensor, pages)
        peer_tokens = peer.tokens(layer, tensor, pages[::-1].copy())
        first, other = move.source_unit, move.target_unit
        if not self.sends:
            first, other = other, first
        if isinstance(peer, Slot):
            other = 0
        # The source packs its own tokens, as a slot does.
        whole = self.case.positions(pair.source)
        packed = torch.arange(len(whole), device="cuda")
        mine = mine[packed if self.sends else whole]
        peer_tokens = peer_tokens[packed if isinstance(peer, Slot) else whole]
        count = len(move.units)
        return torch.equal(mine[:, first : first + count], peer_tokens[:, other : other + count])


def _bytes(size: int) -> torch.Tensor:
    """Return random bytes in GPU memory."""
    words = torch.randint(-(2**62), 2**62, (-(-size // 8),), dtype=torch.int64, device="cuda")
    return words.view(torch.uint8)[:size]


class Times(NamedTuple):
    """Seconds of one measurement; see the module's docstring."""

    host: float
    total: float
    plain: float
    gpu: float
    plain_gpu: float


def on_gpu_s(stream: torch.cuda.Stream, work: Callable[[], object]) -> float:
    """Return the seconds of a stream's work, by the GPU's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def turn(copier: GpuCopier, jobs: list[GpuCopy], plain: list[torch.Tensor]) -> Times:
    """Time a call and a plain copy of as many bytes."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = copier.copy(jobs)
    queued = time.perf_counter()
    done.synchronize()
    end = time.perf_counter()
    plain[1].copy_(plain[0])
    torch.cuda.synchronize()
    plain_s = time.perf_counter() - end
    prepared = [copier.prepare(*job) for job in jobs]
    gpu_s = on_gpu_s(copier.stream, lambda: [copier.start(one) for one in prepared])
    plain_gpu_s = on_gpu_s(torch.cuda.current_stream(), lambda: plain[1].copy_(plain[0]))
    return Times(queued - begin, end - begin, plain_s, gpu_s, plain_gpu_s)


def measure(case: Case, copier: GpuCopier, repeats: int) -> dict[str, Any]:
    """Measure one case, and verify its bytes."""
    memory, rng = Memory(case), np.random.default_rng(7)
    num_bytes = memory.num_bytes
    plain = [_bytes(num_bytes), _bytes(num_bytes)]
    memory.spoil()
    pages = rng.permutation(memory.num_pages)[: memory.num_pages // 2]
    copier.copy(memory.jobs(pages)).synchronize()
    verified = memory.verify(pages)
    halves = (
        rng.permutation(memory.num_pages)[: memory.num_pages // 2] for _ in range(repeats + 3)
    )
    times = [turn(copier, jobs, plain) for jobs in [memory.jobs(pages) for pages in halves]]
    medians = (statistics.median(column) for column in zip(*times[3:], strict=True))
    host, total, copy, gpu, copy_gpu = medians
    return {
        "case": str(case),
        "bytes": num_bytes,
        "us": round(total * 1e6, 1),
        "host_us": round(host * 1e6, 1),
        "gb_per_s": round(num_bytes / total / 1e9),
        "plain_gb_per_s": round(num_bytes / copy / 1e9),
        "ratio": round(copy / total, 3),
        "gpu_ratio": round(copy_gpu / gpu, 3),
        "verified": verified,
    }


def _is_wanted(case: Case, names: list[str]) -> bool:
    return not names or any(name in str(case) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--only", action="append", default=[], help="cases whose names contain this; repeatable"
    )
    args = parser.parse_args()
    repeats = args.repeats
    copier = GpuCopier(Device("cuda"))
    begin = time.perf_counter()
    copier.warm_up()
    warm_up_s = time.perf_counter() - begin
    heads = f"{'MB':>6} {'GB/s':>6} {'plain':>6} {'ratio':>6} {'on GPU':>6} {'call µs':>8}"
    print(f"{'':62} {heads}")
    rows = []
    for case in (case for case in CASES if _is_wanted(case, args.only)):
        row = measure(case, copier, repeats)
        rows.append(row)
        print(
            f"{row['case']:62} {row['bytes'] / 1e6:6.0f} {row['gb_per_s']:6} "
            f"{row['plain_gb_per_s']:6} {row['ratio']:6.3f} {row['gpu_ratio']:6.3f} "
            f"{row['host_us']:8.1f}"
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
