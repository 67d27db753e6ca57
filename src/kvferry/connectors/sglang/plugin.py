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
from typing import Any

import sglang

log = logging.getLogger("kvferry.connectors.sglang")

BACKEND = "kvferry"
VERSION = "0.5.23"
_UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Register the backend; with another version of SGLang, log a warning instead."""
    if sglang.__version__ != VERSION:
        log.warning(
            "the backend kvferry is not available: it needs SGLang %s, and this is %s; "
            "install sglang==%s",
            VERSION,
            sglang.__version__,
            VERSION,
        )
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
    """Return the manager of this scheduler."""
    from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager  # noqa: PLC0415
    from kvferry.connectors.sglang.server_args import settings_of  # noqa: PLC0415

    _hook_requests()
    is_prefill = mode.value == "prefill"
    settings = settings_of(kv_args, server_args, is_mla=bool(is_mla), is_prefill=is_prefill)
    return (PrefillManager if is_prefill else DecodeManager)(kv_args, settings)


# ---------------------------------------------------------------- requests


def _hook_requests() -> None:
    """Pass each request to its sender or receiver; SGLang itself passes only the room."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    prefill = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
    decode = "sglang.srt.disaggregation.decode.DecodePreallocQueue._send_kv_metadata"
    HookRegistry.register(prefill, _bind_sender, HookType.AFTER)
    HookRegistry.register(decode, _bind_receiver, HookType.BEFORE)
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
