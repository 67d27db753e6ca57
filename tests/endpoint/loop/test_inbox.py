"""The inbox: signals for a sleeping loop."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from io import FileIO
from typing import Any

from kvferry.endpoint.loop.inbox import Inbox, new_pipe


class LateWriter(FileIO):
    """The sending end of an inbox, whose byte leaves after the owner has taken the call."""

    def before(self, drain: Callable[[], object]) -> None:
        self._drain = drain

    def write(self, signal: Any) -> int:
        self._drain()
        return super().write(signal)


def test_a_byte_that_comes_after_its_call_does_not_keep_the_owner_awake() -> None:
    reader, other = new_pipe()
    writer = LateWriter(os.dup(other.fileno()), "w")
    other.close()
    inbox: Inbox[str] = Inbox((reader, writer))
    taken: list[str] = []
    writer.before(lambda: taken.extend(inbox.drain()))
    inbox.put("a write has ended")
    assert len(taken) == 1
    assert inbox.prepare_sleep()
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    inbox.wake(signalled=True)
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()
