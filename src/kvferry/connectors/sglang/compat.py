"""Versions of SGLang that the backend supports, and the differences between them.

The versions in ``TESTED_VERSIONS`` ran the tests with real servers. Another version is judged by
its hooks: if all of them are there the backend runs with a warning, else it names the first
missing one. The module imports SGLang only to look at it.
"""

from __future__ import annotations

import logging
import pkgutil
import re
from collections.abc import Iterable
from typing import Any

from kvferry import InputError

log = logging.getLogger("kvferry.connectors.sglang")

TESTED_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")

_DISAGGREGATION = "sglang.srt.disaggregation"
CREATE_SENDER = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue.create_sender"
SEND_METADATA = f"{_DISAGGREGATION}.decode.DecodePreallocQueue._send_kv_metadata"
RELEASE = "sglang.srt.managers.scheduler.Scheduler.release_host_resources"
IS_IDLE = "sglang.srt.managers.scheduler.Scheduler.is_fully_idle"
# Hooks that every process of SGLang needs to offer the backend.
PLUGIN_HOOKS = (
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.server_args.add_disagg_transfer_backend_choices",
    f"{_DISAGGREGATION}.utils.TransferBackend",
    f"{_DISAGGREGATION}.utils.get_kv_class",
)
# Hooks that a scheduler needs to run it.
SCHEDULER_HOOKS = (CREATE_SENDER, SEND_METADATA, RELEASE, IS_IDLE)
_INTERFACES = f"{_DISAGGREGATION}.base.conn"


def is_tested(version: str) -> bool:
    """Return whether this version, or the one that it repackages, ran the tests."""
    found = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", version)
    return found is not None and found[1] in TESTED_VERSIONS


def missing_hook(paths: Iterable[str]) -> str | None:
    """Return the first function or class that cannot be found; None if all are there."""
    for path in paths:
        try:
            pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            return path
    return None


def missing_method(theirs: type, ours: type) -> str | None:
    """Return the first public attribute of SGLang's interface that kvferry's class lacks."""
    public = (name for name in vars(theirs) if not name.startswith("_"))
    return next((name for name in sorted(public) if not hasattr(ours, name)), None)


def why_unavailable(version: str) -> str | None:
    """Return why the backend cannot be offered to this version; None if it can."""
    missing = None if is_tested(version) else missing_hook(PLUGIN_HOOKS)
    return None if missing is None else _without(version, missing)


def check_scheduler(version: str, classes: Iterable[tuple[str, type]]) -> None:
    """Raise ``InputError`` if a scheduler cannot run the backend; warn if it was never tested.

    ``classes``: the name of an interface of SGLang, and a class of the backend that implements it.
    """
    if is_tested(version):
        return
    missing = missing_hook(SCHEDULER_HOOKS)
    if missing is not None:
        raise InputError(_without(version, missing))
    for name, ours in classes:
        lacking = missing_method(pkgutil.resolve_name(f"{_INTERFACES}.{name}"), ours)
        if lacking is not None:
            raise InputError(
                f"SGLang {version:.40} calls {name}.{lacking}, which kvferry lacks; {_remedy()}"
            )
    log.warning("untested-version sglang=%s tested=%r", version, ", ".join(TESTED_VERSIONS))


def _without(version: str, missing: str) -> str:
    return f"SGLang {version:.40} has no {missing}, which kvferry hooks; {_remedy()}"


def _remedy() -> str:
    tested = ", ".join(TESTED_VERSIONS)
    return f"install a tested version ({tested}), or a kvferry that supports this one"


# ---------------------------------------------------------------- settings that 0.5.21 lacks


def num_dp_ranks(parallel: Any) -> int:
    """Return the number of data-parallel ranks; ``dp_size`` in 0.5.21."""
    return int(getattr(parallel, "num_dp_ranks", parallel.dp_size))


def shards_kv_cache(parallel: Any) -> bool:
    """Return whether ``--enable-kv-cache-sharding`` is set."""
    return bool(getattr(parallel, "enable_kv_cache_sharding", False))


def allocates_early(disagg: Any) -> bool:
    """Return whether decode allocates its pages before prefill computes them."""
    policy = getattr(disagg, "disaggregation_decode_allocation_policy", "early")
    return bool(policy == "early")
