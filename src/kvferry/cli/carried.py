"""How the cache travelled in a cluster, as its workers count it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from kvferry.reference.cluster.launch import ClusterLaunch, health
from kvferry.reference.options import InstanceOptions

# An answer is complete a little before its room has ended at prefill.
SETTLE_S = 5.0


def carried_by_mode(launch: ClusterLaunch) -> dict[str, int]:
    """Return the bytes that all workers have sent, by transfer mode, the most first."""
    carried = Counter[str]()
    for child in launch.children:
        if isinstance(child.options, InstanceOptions):
            carried.update(_settled(child.url).get("carried_bytes", {}))
    return {mode: num_bytes for mode, num_bytes in carried.most_common() if num_bytes}


def _settled(url: str) -> dict[str, Any]:
    """Return a worker's state once it has no room."""
    deadline = time.monotonic() + SETTLE_S
    while (state := health(url)).get("rooms") and time.monotonic() < deadline:
        time.sleep(0.02)
    return state
