"""Differences between the vLLM versions that the connector supports. Imports no vLLM by itself.

A version in ``TESTED_VERSIONS`` ran the real-engine tests. Any other is judged by what it has: with
all names, hooks and fields that the connector uses it starts with a warning, and otherwise it is
refused with the first one that is missing. ``caches.py`` judges the layout of the caches.

vLLM 0.30 calls ``wait_for_save`` only in steps that compute something. The connector therefore
handles in ``handle_preemptions``, the first hook of every step in every version, what may come with
an empty step.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from kvferry import InputError

log = logging.getLogger("vllm.kvferry")

TESTED_VERSIONS = ("0.30", "0.31", "0.32")
# The hooks that the connector relies on vLLM to call.
HOOKS = (
    "bind_gpu_block_pool",
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_num_new_matched_tokens",
    "get_required_kvcache_layout",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_push_work",
    "on_new_request",
    "register_kv_caches",
    "request_finished",
    "save_kv_layer",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_save",
)
# Fields of vLLM's ``SchedulerOutput``.
STEP_FIELDS = ("has_sync_kv_loads", "kv_connector_block_state", "preempted_req_ids")


def check_version(version: str, base: type, step: type) -> None:
    """Raise ``InputError`` if an untested vLLM lacks something; warn if it lacks nothing.

    ``base`` is that vLLM's ``KVConnectorBase_V1``, and ``step`` its ``SchedulerOutput``.
    """
    if _release(version) in map(_release, TESTED_VERSIONS):
        return
    for hook in HOOKS:
        if not hasattr(base, hook):
            raise _lacking(version, f"no connector hook {hook}()")
    for name in STEP_FIELDS:
        if not hasattr(step, name):
            raise _lacking(version, f"no SchedulerOutput.{name}")
    log.warning("untested-version vllm=%s tested=%r", version, ", ".join(TESTED_VERSIONS))


def missing_import(version: str, error: ImportError) -> InputError:
    """Return the refusal of a vLLM from which the connector can't import a name."""
    return _lacking(version, f"not what the connector imports ({error})")


def _lacking(version: str, what: str) -> InputError:
    return InputError(
        f"vLLM {version:.40} has {what}; install a tested version ({', '.join(TESTED_VERSIONS)}), "
        f"or a kvferry that supports this one"
    )


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def cache_hit_source() -> object | None:
    """Return vLLM's label for tokens that come from another instance; None before 0.32."""
    try:
        module = importlib.import_module("vllm.v1.metrics.cache_hit_source")
    except ImportError:
        return None
    source: object = module.CacheHitSource.P2P
    return source


def engine_waker() -> Callable[[], None] | None:
    """Return a function that makes an idle engine core step; None if no engine core is found.

    To be called in the constructor of vLLM's scheduler, while the engine core makes it. An idle
    core waits for its input queue, which no hook gives to a connector, so it is taken from the
    callers' frames. The item is the one by which vLLM wakes the core for a shutdown.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        queue = getattr(frame.f_locals.get("self"), "input_queue", None)
        if queue is not None:
            kind = importlib.import_module("vllm.v1.engine").EngineCoreRequestType.WAKEUP
            return partial(queue.put_nowait, (kind, None))
        frame = frame.f_back
    log.warning("pulls-not-answered reason='the engine core has no queue by which to wake it'")
    return None
