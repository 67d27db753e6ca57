"""Tests of the preparation of compiled loops."""

from __future__ import annotations

import subprocess
import sys

USE_EACH = """
import sys
import numpy as np
from kvferry.memory.checksum.cpu import CellSums
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.warm import warm_up
from kvferry.layout import Layout, attention
from kvferry.plan import Binding, PageTable, RankPair, Request, contiguous_pools, reshard
from kvferry.plan.content import ALL_CELLS, ContentView, ProofRequest, cell_entries
from kvferry.plan.places import Base
layout = Layout(attention(layers=1, kv_heads=1, head_dim=128))
pools = contiguous_pools(layout, 0, 2)
regions = [np.zeros(size, dtype=np.uint8) for size in pools.region_bytes]
addresses = [region.ctypes.data for region in regions]
warm_up()
loaded = set(sys.modules)
view = ContentView(layout, layout.rank_shards(0), pools.map, {"kv": PageTable([1])})
proof = ProofRequest(1, ALL_CELLS)
entries = cell_entries(reshard(layout, layout), RankPair(0, 0), Request(16), proof, view)
assert any(CellSums(1, 1, entries, addresses).finish())
copy_binding(Binding.bulk(Base(0, 0, 0), Base(0, 0, 64), 64), addresses, addresses)
print(*sorted(set(sys.modules) - loaded))
"""


def test_first_room_imports_nothing() -> None:
    arguments = [sys.executable, "-W", "error", "-c", USE_EACH]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=240)
    assert (done.stdout, done.stderr) == ("\n", "")
