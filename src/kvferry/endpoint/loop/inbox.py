"""The inbox: a queue through which other threads send items to the loop.

Any thread may call ``put``, which never blocks. The loop polls ``fileno`` together with its
sockets while it sleeps. Only a sleeping loop is woken, because writing to the pipe is the most
expensive part: a running loop checks the queue before it sleeps (``prepare_sleep``).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from io import FileIO
from typing import Any


def new_pipe() -> tuple[FileIO, FileIO]:
    """Return a non-blocking pipe. A signal costs a third of one through a socket pair."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return FileIO(reader, "r"), FileIO(writer, "w")


class Inbox:
    """A queue with a file descriptor that becomes readable when an item arrives during a sleep."""

    def __init__(self, pipe: tuple[FileIO, FileIO] | None = None) -> None:
        self._items: deque[Any] = deque()
        self._reader, self._writer = pipe or new_pipe()
        # Whether the loop will look by itself, or was signalled.
        self._awake = False

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._reader.fileno()

    def put(self, item: object) -> None:
        """Queue an item, and wake the loop if it sleeps."""
        self._items.append(item)
        if not self._awake:
            self._awake = True
            # The pipe is closed once the loop has ended.
            with contextlib.suppress(OSError, ValueError):
                self._writer.write(b"\0")

    def prepare_sleep(self) -> bool:
        """Request a signal for the next item. Return False if items wait: then do not sleep."""
        self._awake = False
        return not self._items

    def wake(self, *, signalled: bool) -> None:
        """Note that the loop runs. ``signalled``: the file descriptor is readable.

        A signal may arrive after its item was taken. It must be read all the same, or it would keep
        the poller from sleeping.
        """
        self._awake = True
        if signalled:
            self._reader.read(64)

    def drain(self) -> list[Any]:
        """Remove and return all items."""
        items: list[Any] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Close the pipe."""
        self._reader.close()
        self._writer.close()
