"""An inbox: how other threads talk to an owner, in values and in order.

``put`` may be called from any thread and never waits. The owner polls ``fileno`` beside its
sockets while it sleeps. Only then is it woken, because waking it costs more than all else:
an owner that is awake looks before it lies down (``rest``).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from io import FileIO
from typing import Generic, TypeVar

T = TypeVar("T")


def new_pipe() -> tuple[FileIO, FileIO]:
    """Two ends that never wait. A signal costs a third of what it does in a pair of sockets."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    return FileIO(reader, "r"), FileIO(writer, "w")


class Inbox(Generic[T]):
    """A queue with a file number that becomes readable when there is something for a sleeper."""

    def __init__(self, pipe: tuple[FileIO, FileIO] | None = None) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = pipe or new_pipe()
        # Whether the owner will look by itself, or was called.
        self._awake = False

    def fileno(self) -> int:
        """For a poller."""
        return self._reader.fileno()

    def put(self, item: T) -> None:
        """Give the owner something."""
        self._items.append(item)
        if not self._awake:
            self._awake = True
            # Closed: the owner has gone, and nobody is left to wake.
            with contextlib.suppress(OSError, ValueError):
                self._writer.write(b"\0")

    def rest(self) -> bool:
        """Be woken from now on; whether nothing came before, so that the owner may sleep."""
        self._awake = False
        return not self._items

    def rise(self, *, called: bool) -> None:
        """The owner is awake. ``called``: the file is readable, also if what it told of is taken.

        A byte may be sent after its item was taken, and left unread it would keep the poller
        awake.
        """
        self._awake = True
        if called:
            self._reader.read(64)

    def drain(self) -> list[T]:
        """Everything that is there."""
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Give the pipe back."""
        self._reader.close()
        self._writer.close()
