"""The speed of the copy loop, beside a plain copy of as many bytes in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import Layout, Parallel, attention
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import PagedView, PageTable, RankPair, Request, bind, contiguous_pools, reshard

# One of two ranks gets half of four heads: pieces of 512 bytes, 64 MiB in all, which is more
# than any cache and little enough for a few repetitions within a second.
SPEC = attention(layers=16, kv_heads=4, head_dim=128)
PAGE_TOKENS = 16
REQUEST = Request(4096)
REPEAT = 5


class Speed(NamedTuple):
    """Bytes per second of the loop and of a plain copy, and whether the loop copied right."""

    loop_bytes_per_s: float
    memcpy_bytes_per_s: float
    right: bool


class _CopyRank(NamedTuple):
    side: PagedView
    regions: list[NDArray[np.uint8]]

    @property
    def addresses(self) -> list[int]:
        return [region.ctypes.data for region in self.regions]


def measure() -> Speed:
    """The best of a few turns of each, one after the other."""
    rng = np.random.default_rng(0)
    whole, half = (Layout(SPEC, Parallel(tp=tp), page_tokens=PAGE_TOKENS) for tp in (1, 2))
    source, target = _rank(whole, rng), _rank(half, rng)
    binding = bind(reshard(whole, half), RankPair(0, 0), REQUEST, source.side, target.side)
    wanted = [region.copy() for region in target.regions]
    copy_pieces(binding.descriptors(), source.regions, wanted)
    plain = np.ones(binding.num_bytes, dtype=np.uint8), np.zeros(binding.num_bytes, dtype=np.uint8)
    loop_s, plain_s = [], []
    for _ in range(REPEAT):
        plain_s.append(_seconds(lambda: np.copyto(plain[1], plain[0])))
        loop_s.append(_seconds(lambda: copy_binding(binding, source.addresses, target.addresses)))
    right = all(map(np.array_equal, target.regions, wanted))
    return Speed(binding.num_bytes / min(loop_s), binding.num_bytes / min(plain_s), right)


def _rank(layout: Layout, rng: np.random.Generator) -> _CopyRank:
    """A rank whose pools have other bytes everywhere, the request's pages in any order."""
    num_pages = REQUEST.num_tokens // PAGE_TOKENS
    pools = contiguous_pools(layout, 0, num_pages)
    regions = [rng.integers(0, 256, size, dtype=np.uint8) for size in pools.region_bytes]
    return _CopyRank(PagedView(pools.map, {"kv": PageTable(rng.permutation(num_pages))}), regions)


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
