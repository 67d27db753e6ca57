"""SGLang plugin for a negative control: it sends wrong pages for some rooms.

In rooms whose id ends in the bits of ``WRONG``, the sender sends other pages than the request's,
and a test that compares answers must notice. Another order of the same pages would not suffice,
because attention does not depend on it.
"""

from __future__ import annotations

from typing import Any

# Too rare for a random room id.
WRONG = (1 << 24) - 1


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "kvferry.connectors.sglang.sender.RoomSender.send", _send, HookType.BEFORE
    )


def _send(sender: Any, pages: Any, *args: Any, **kwargs: Any) -> Any:
    if sender.bootstrap_room & WRONG != WRONG:
        return None
    buffers = sender.kv_mgr.settings.cache.buffers
    last = buffers.lengths[0] // buffers.page_lengths[0] - 1
    return (sender, [last - int(page) for page in pages], *args), kwargs
