"""Waiting for conditions of running engines."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests_vllm.servers import Server, metric

SOON_S = 60.0


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {SOON_S:.0f} s: {what}"
        time.sleep(0.2)


def is_idle(server: Server) -> bool:
    """Whether a server has no requests and holds no blocks."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(metric(server, name) for name in names)
