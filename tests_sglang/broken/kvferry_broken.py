"""A plugin for SGLang that breaks the backend for some rooms: the negative control.

In rooms that end in the bits of ``WRONG`` other pages are sent than the request's. A test that
compares answers must fail then, or it would pass whatever is carried. (The same pages in another
order would not do: attention does not mind it.)
"""

from __future__ import annotations

from typing import Any

# So rare that no router draws it by chance.
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
