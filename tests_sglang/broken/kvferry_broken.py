"""A plugin for SGLang that breaks the backend for some rooms: the negative control.

In rooms of ``WRONG`` and above, the pages of each chunk are sent in the opposite order. A test that
compares answers must fail then, or it would pass whatever is carried.
"""

from __future__ import annotations

from typing import Any

WRONG = 1 << 62


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "kvferry.integrations.sglang.sender.RoomSender.send", _send, HookType.BEFORE
    )


def _send(sender: Any, pages: Any, *args: Any, **kwargs: Any) -> Any:
    if sender.bootstrap_room < WRONG:
        return None
    return (sender, list(reversed(pages)), *args), kwargs
