"""The queue by which kvferry's threads receive work, with optional timeouts.

The standard library's queues do not fit. Before Python 3.13 a timed ``queue.SimpleQueue.get`` can
block for ever: if the thread loses its core between two readings of the clock, the remaining time
becomes negative, which the C code takes for "no timeout". Short timeouts on busy cores are enough,
and a transfer has hung that way. ``queue.Queue`` is correct but needs two locks and a condition
where one lock is enough.

Here one lock serves as a wake-up flag: it is held while nothing was put since the last wait. The
remaining time is never negative, and a wake-up for an item that was already taken costs one more
iteration.

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
    """FIFO queue with many producers and one consumer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._items: deque[T] = deque()
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def put(self, item: T) -> None:
        """Append an item. Never blocks."""
        self._items.append(item)
        if self._wakeup.locked():
            # Another producer may have released it since, which wakes the consumer just as well.
            with contextlib.suppress(RuntimeError):
                self._wakeup.release()

    def get_now(self) -> T:
        """Return the next item without waiting. Raises ``queue.Empty``."""
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def get(self, timeout_s: float | None = None) -> T:
        """Return the next item, waiting for it if necessary. Raises ``queue.Empty``."""
        until = None if timeout_s is None else self._clock() + timeout_s
        while not self._items:
            if not self._wait(until):
                # An item may have arrived just as the time ran out.
                break
        return self.get_now()

    def drain(self, timeout_s: float | None = None) -> list[T]:
        """Return all items, waiting for the first if necessary; empty after a timeout."""
        items: list[T] = []
        with contextlib.suppress(Empty):
            items.append(self.get(timeout_s))
            while self._items:
                items.append(self.get_now())
        return items

    def _wait(self, until: float | None) -> bool:
        if until is None:
            return self._wakeup.acquire()
        return self._wakeup.acquire(timeout=max(0.0, until - self._clock()))

    def __len__(self) -> int:
        return len(self._items)
