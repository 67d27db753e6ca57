"""The inbox: signals for a sleeping loop."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from io import FileIO
from typing import Any

from kvferry.endpoint.loop.inbox import Inbox, new_pipe


class LateWriter(FileIO):
    """Writing end of the pipe, which runs a function before it writes the signal."""

    def before(self, drain: Callable[[], object]) -> None:
        self._drain = drain

    def write(self, signal: Any) -> int:
        self._drain()
        return super().write(signal)


def test_a_late_signal_does_not_keep_the_loop_awake() -> None:
    reader, other = new_pipe()
    writer = LateWriter(os.dup(other.fileno()), "w")
    other.close()
    inbox: Inbox = Inbox((reader, writer))
    taken: list[str] = []
    writer.before(lambda: taken.extend(inbox.drain()))
    inbox.put("a write has ended")
    assert len(taken) == 1
    assert inbox.prepare_sleep()
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    inbox.wake(signalled=True)
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()


def test_the_inbox_keeps_order_and_wakes_the_loop() -> None:
    inbox: Inbox = Inbox()
    seen: list[int] = []

    def put() -> None:
        for number in range(1000):
            inbox.put(number)

    thread = threading.Thread(target=put)
    thread.start()
    poller = select.poll()
    poller.register(inbox.fileno(), select.POLLIN)
    while len(seen) < 1000:
        if inbox.prepare_sleep():
            assert poller.poll(10_000), "no signal"
        inbox.wake(signalled=bool(poller.poll(0)))
        seen += inbox.drain()
    thread.join()
    assert seen == list(range(1000))
    inbox.close()
