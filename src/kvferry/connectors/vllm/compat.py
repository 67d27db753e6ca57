"""Differences between the vLLM versions that the connector supports. Imports no vLLM by itself.

A version in ``TESTED_VERSIONS`` ran the real-engine tests. Older versions are refused: 0.30 answers
right but does not release the blocks of a prefill. A newer version is judged by the hooks of its
connector base class: if all of them are there the connector starts with a warning, else it refuses
and names the first missing hook.
"""

from __future__ import annotations

import importlib
import logging
import re

from kvferry import InputError

log = logging.getLogger("vllm.kvferry")

TESTED_VERSIONS = ("0.31", "0.32")
# The hooks that the connector relies on vLLM to call.
HOOKS = (
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_num_new_matched_tokens",
    "get_required_kvcache_layout",
    "get_transfer_results",
    "handle_preemptions",
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


def check_version(version: str, base: type) -> None:
    """Raise ``InputError`` if a vLLM is too old or lacks a hook; warn if it was never tested.

    ``base`` is that vLLM's ``KVConnectorBase_V1``.
    """
    release = _release(version)
    if release in map(_release, TESTED_VERSIONS):
        return
    tested = ", ".join(TESTED_VERSIONS)
    if release is not None and release < (0, 31):
        raise InputError(f"vLLM {version:.40} is too old; install a tested version ({tested})")
    missing = [hook for hook in HOOKS if not hasattr(base, hook)]
    if missing:
        raise InputError(
            f"vLLM {version:.40} has no connector hook {missing[0]}(); "
            f"install a tested version ({tested}), or a kvferry that supports this one"
        )
    log.warning("untested-version vllm=%s tested=%r", version, tested)


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
