"""SGLang plugin that registers the transfer backend ``kvferry``.

SGLang calls ``register`` in each of its processes (entry point group ``sglang.srt.plugins``), also
if another backend is used, so ``register`` only extends the list of backends. The hooks that this
backend needs are installed when SGLang creates its manager, in the scheduler's process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import sglang

from kvferry.connectors.sglang.compat import (
    CREATE_SENDER,
    IS_IDLE,
    RELEASE,
    SEND_METADATA,
    check_scheduler,
    why_unavailable,
)

log = logging.getLogger("kvferry.connectors.sglang")

BACKEND = "kvferry"
_UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Register the backend; if SGLang lacks a hook for it, log a warning instead."""
    reason = why_unavailable(sglang.__version__)
    if reason is not None:
        log.warning("the backend kvferry is not available: %s", reason)
        return
    from sglang.srt.disaggregation.utils import TransferBackend  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415
    from sglang.srt.server_args import add_disagg_transfer_backend_choices  # noqa: PLC0415

    members = {member.name: member.value for member in TransferBackend}
    extended = Enum("TransferBackend", {**members, "KVFERRY": BACKEND})  # type: ignore[misc]
    add_disagg_transfer_backend_choices([BACKEND])
    HookRegistry.register(f"{_UTILS}.TransferBackend", extended, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return SGLang's class for a backend, or this backend's own."""
    if transfer_backend.value != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from kvferry.connectors.sglang.prefill_registry import BootstrapServer  # noqa: PLC0415
    from kvferry.connectors.sglang.receiver import RoomReceiver  # noqa: PLC0415
    from kvferry.connectors.sglang.sender import RoomSender  # noqa: PLC0415

    classes = {
        "manager": _new_manager,
        "sender": RoomSender,
        "receiver": RoomReceiver,
        "bootstrap_server": BootstrapServer,
    }
    return classes[class_type.value]


def _new_manager(kv_args: Any, mode: Any, server_args: Any, is_mla: bool | None = False) -> Any:
    """Return the manager of this scheduler; SGLang makes another one when its role changes."""
    from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager  # noqa: PLC0415
    from kvferry.connectors.sglang.server_args import settings_of  # noqa: PLC0415

    _hook_scheduler()
    is_prefill = mode.value == "prefill"
    settings = settings_of(kv_args, server_args, is_mla=bool(is_mla), is_prefill=is_prefill)
    return (PrefillManager if is_prefill else DecodeManager)(kv_args, settings)


# ---------------------------------------------------------------- hooks in a scheduler


@cache
def _hook_scheduler() -> None:
    """Install the hooks in a scheduler, once in its process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager  # noqa: PLC0415
    from kvferry.connectors.sglang.receiver import RoomReceiver  # noqa: PLC0415
    from kvferry.connectors.sglang.sender import RoomSender  # noqa: PLC0415

    check_scheduler(
        sglang.__version__,
        [
            ("BaseKVManager", PrefillManager),
            ("BaseKVManager", DecodeManager),
            ("BaseKVSender", RoomSender),
            ("BaseKVReceiver", RoomReceiver),
        ],
    )
    # SGLang itself passes only the room to senders and receivers.
    HookRegistry.register(CREATE_SENDER, _bind_sender, HookType.AFTER)
    HookRegistry.register(SEND_METADATA, _bind_receiver, HookType.BEFORE)
    HookRegistry.register(RELEASE, _close_endpoint, HookType.BEFORE)
    HookRegistry.register(IS_IDLE, _is_idle, HookType.AFTER)
    HookRegistry.apply_hooks()


def _bind_sender(created: bool, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    from kvferry.connectors.sglang.sender import RoomSender  # noqa: PLC0415

    # Warm-up and health checks use a sender of SGLang.
    if created and isinstance(req.disagg_kv_sender, RoomSender):
        req.disagg_kv_sender.bind_request(req, queue.scheduler.sliding_window_size)


def _bind_receiver(queue: Any, decode_req: Any, *_: Any, **__: Any) -> None:
    from kvferry.connectors.sglang.receiver import RoomReceiver  # noqa: PLC0415

    if isinstance(decode_req.kv_receiver, RoomReceiver):
        decode_req.kv_receiver.bind_request(decode_req.req, queue.scheduler.sliding_window_size)
        # After this timeout SGLang would reuse pages that may still be written.
        queue.transfer_queue.deferred_kv_release_timeout = math.inf


def _is_idle(idle: bool, scheduler: Any, for_health_check: bool = False, **_: Any) -> bool:
    """Return False while a failed room's pages are held.

    SGLang 0.5.21 and 0.5.22 ignore these pages, so flushing the cache would free them too early,
    and then a second time.
    """
    queue = scheduler.disagg_decode_transfer_queue
    holds_pages = queue is not None and queue.has_pending_deferred_releases()
    return idle and (for_health_check or not holds_pages)


def _close_endpoint(scheduler: Any, *_: Any, **__: Any) -> None:
    """Close the endpoint before a scheduler ends; SGLang has waited for its requests."""
    from kvferry.connectors.sglang.managers import RankManager  # noqa: PLC0415

    for queue in (scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_decode_prealloc_queue):
        manager = getattr(queue, "kv_manager", None)
        if isinstance(manager, RankManager):
            manager.close()
