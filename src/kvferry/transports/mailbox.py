"""A mailbox: the queue of every thread of ours that waits, with or without a limit.

Why not the standard library's: before Python 3.13 a timed get of ``queue.SimpleQueue``
can wait for ever. It takes its lock, subtracts, and if the thread was off its core
meanwhile what is left of the time is below zero, which to C means "no limit". Short
limits on busy cores are all it takes, and a transfer hung that way. ``queue.Queue`` is
right, but takes two locks and a condition for what one lock can say.

Here the lock is a bell: locked while nothing was put. What is left of a wait is never
below zero, and a bell that was rung for something already taken costs one more look.

Any thread may put; one thread takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in the order in which they were put."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._items: deque[T] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, item: T) -> None:
        """Never waits."""
        self._items.append(item)
        if self._bell.locked():
            # Somebody else may have rung it meanwhile: then nobody sleeps either.
            with contextlib.suppress(RuntimeError):
                self._bell.release()

    def get_now(self) -> T:
        """The next item. Raises ``queue.Empty``."""
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout_s: float | None = None) -> T:
        """The next item, waiting for it if need be. Raises ``queue.Empty``."""
        until = None if timeout_s is None else self._clock() + timeout_s
        while not self._items:
            if not self._listen(until):
                # One last look: it may have come as the time ran out.
                break
        return self.get_now()

    def drain(self, timeout_s: float | None = None) -> list[T]:
        """All that is there, waiting for the first if need be; nothing if none came in time."""
        items: list[T] = []
        with contextlib.suppress(Empty):
            items.append(self.get(timeout_s))
            while self._items:
                items.append(self.get_now())
        return items

    def _listen(self, until: float | None) -> bool:
        """Wait for the bell; whether it rang in time."""
        if until is None:
            return self._bell.acquire()
        return self._bell.acquire(timeout=max(0.0, until - self._clock()))

    def __len__(self) -> int:
        return len(self._items)
