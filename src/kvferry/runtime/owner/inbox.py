"""An inbox: how other threads talk to an owner, in values and in order.

``put`` may be called from any thread and never waits. The owner polls ``fileno``
beside its sockets and takes what ``drain`` gives it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with a file number that becomes readable when there is something in it."""

    def __init__(self, pair: tuple[socket.socket, socket.socket] | None = None) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = pair or socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._signalled = False

    def fileno(self) -> int:
        """For a poller."""
        return self._reader.fileno()

    def put(self, item: T) -> None:
        """Give the owner something."""
        self._items.append(item)
        if not self._signalled:
            self._signalled = True
            # Full or closed: the owner is awake, or it has gone and nobody is left to wake.
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def drain(self) -> list[T]:
        """Everything that is there."""
        # Also if nobody has signalled: a byte may be sent after its item was taken, and left
        # unread it would keep the poller awake.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        # Before the queue is read: whoever puts something after that signals again.
        self._signalled = False
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Give the sockets back."""
        self._reader.close()
        self._writer.close()
