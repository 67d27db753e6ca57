"""How other threads talk to an owner: calls that it makes for them, in order.

``put`` may be called from any thread and never waits. The owner polls ``fileno``
beside its sockets and makes the calls that ``drain`` gives it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class Inbox:
    """A queue of calls with a file number that becomes readable when there are some."""

    def __init__(self, pair: tuple[socket.socket, socket.socket] | None = None) -> None:
        self._calls: deque[Call] = deque()
        self._reader, self._writer = pair or socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._signalled = False

    def fileno(self) -> int:
        """For a poller."""
        return self._reader.fileno()

    def put(self, call: Call) -> None:
        """Let the owner make this call."""
        self._calls.append(call)
        if not self._signalled:
            self._signalled = True
            # Full or closed: the owner is awake, or it has gone and nobody is left to wake.
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def drain(self) -> list[Call]:
        """Every call that is there."""
        # Also if nobody has signalled: a byte may be sent after its call was taken, and left
        # unread it would keep the poller awake.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        # Before the queue is read: whoever puts something after that signals again.
        self._signalled = False
        calls: list[Call] = []
        while self._calls:
            calls.append(self._calls.popleft())
        return calls

    def __len__(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        """Give the sockets back."""
        self._reader.close()
        self._writer.close()
