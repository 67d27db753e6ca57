"""Tests of how sums are computed in a rank's memory."""

from __future__ import annotations

import numpy as np
from moving import filled, random_cache
from summing import FULL, cells_of, sums_of

from kvferry.layout import Layout, attention
from kvferry.memory.checksum.cpu import CellSums
from kvferry.memory.checksum.devices import sums_in
from kvferry.memory.pools import Memory
from kvferry.plan import RankPair, Request, reshard
from kvferry.regions import Region


def test_host_memory_is_summed_by_the_cpu() -> None:
    layout, rng = Layout(attention(layers=2, kv_heads=2, head_dim=8)), np.random.default_rng(1)
    request = Request(40)
    (rank,) = filled(layout, random_cache(layout.spec, 40, rng), request, rng)
    regions = tuple(Region(each.ctypes.data, each.nbytes) for each in rank.regions)
    about = reshard(layout, layout), RankPair(0, 0), request
    sums = sums_in(Memory(rank.side.pools, regions), layout.spec)(
        FULL.seed, *cells_of(*about, rank)
    )
    assert isinstance(sums, CellSums)
    while sums.step():
        pass
    assert sums.result == sums_of(*about, rank)
