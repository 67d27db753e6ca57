"""Connectors that record what their hooks cost, for ``hook_times.py``.

Calls and seconds of every hook are summed from a request's arrival to its end, and from there to
the next request. Each sum becomes a line of the file that the variable ``HOOK_TIMES`` names. The
scheduler and the worker must share a process: VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvferry.connectors.vllm.connector import KVFerryConnector

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "update_connector_output",
    "request_finished_all_groups",
)


class Recorder:
    """Sums of the hooks of one process."""

    def __init__(self) -> None:
        self._reset(cpu=self._threads_cpu_s())

    def _reset(self, cpu: float) -> None:
        self._began, self._cpu = time.perf_counter(), cpu
        self._calls: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, hook: str, seconds: float) -> None:
        self._calls[hook] += 1
        self._seconds[hook] += seconds

    def end(self, part: str) -> None:
        """Write the sums as one line, and start again."""
        cpu = self._threads_cpu_s()
        line = {
            "part": part,
            "ms": 1e3 * (time.perf_counter() - self._began),
            "threads_cpu_ms": 1e3 * (cpu - self._cpu),
            "steps": self._calls["build_connector_meta"],
            "calls": dict(self._calls),
            "hook_ms": {hook: 1e3 * seconds for hook, seconds in self._seconds.items()},
        }
        with Path(os.environ["HOOK_TIMES"]).open("a") as out:
            out.write(json.dumps(line) + "\n")
        self._reset(cpu)

    def _threads_cpu_s(self) -> float:
        """Return the CPU time of the process except for this thread, on which vLLM computes."""
        return time.process_time() - time.clock_gettime(
            time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        )


RECORDER = Recorder()


def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "on_new_request":
            RECORDER.end("before")
        began = time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            RECORDER.add(name, time.perf_counter() - began)
            if name == "request_finished_all_groups":
                RECORDER.end("request")

    return wrapper


def with_timed_hooks(base: type[KVConnectorBase_V1], name: str) -> type[KVConnectorBase_V1]:
    hooks = {hook: timed(hook, getattr(base, hook)) for hook in HOOKS}
    return type(name, (base,), hooks | {"__module__": __name__})


TimedKVFerryConnector = with_timed_hooks(KVFerryConnector, "TimedKVFerryConnector")
TimedNixlConnector = with_timed_hooks(NixlConnector, "TimedNixlConnector")
