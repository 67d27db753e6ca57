"""Freezing the heap after start-up."""

from __future__ import annotations

import subprocess
import sys

from kvferry.layout import Layout, Parallel, attention
from kvferry.testing.fleet import Fleet, FleetSide

SCRIPT = """
import gc
import kvferry

held = [[] for _ in range(100_000)]
lost = []
lost.append(lost)
del lost
kvferry.freeze_gc()
assert gc.get_freeze_count() > 100_000
assert len(gc.get_objects()) < 1_000, len(gc.get_objects())
# New objects are collected as before.
found = gc.collect()
one = []
one.append(one)
del one
assert gc.collect() == found + 1
"""


def test_existing_objects_are_not_collected_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_ranks_of_a_fleet_freeze_their_heaps() -> None:
    layout = Layout(attention(layers=1, kv_heads=1, head_dim=8), Parallel(), page_tokens=4)
    sides = [FleetSide(name, layout, 4) for name in ("prefill", "decode")]
    with Fleet(*sides, transport="shm") as fleet:
        counts = fleet.all([*fleet.sources, *fleet.targets["decode"]], "num_frozen")
    assert min(counts) > 10_000
