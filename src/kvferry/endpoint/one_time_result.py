"""Something that happens once: set by one thread, awaited and listened for by any.

``concurrent.futures.Future`` can do the same and more, such as being cancelled, and takes a
condition and several locks for it. A room has two of these on either side, and an owner looks
at them with every frame.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("kvferry.endpoint")

T = TypeVar("T")


class OneTimeResult(Generic[T]):
    """What has happened, when it has: ``value`` is None before, and never after."""

    __slots__ = ("_callbacks", "_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[T], object]] = []
        self.value: T | None = None

    def set(self, value: T) -> bool:
        """It happens now; False if it has before. Whoever listens is called on this thread."""
        with self._lock:
            if self.value is not None:
                return False
            self.value = value
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, value)
        return True

    def then(self, callback: Callable[[T], object]) -> None:
        """Call this when it happens, at once if it has."""
        with self._lock:
            if self.value is None:
                self._callbacks.append(callback)
                return
            value = self.value
        _call(callback, value)

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for it. Raises ``TimeoutError``."""
        value = self.value
        if value is None:
            value = self._waited(timeout_s)
        if value is None:
            raise TimeoutError
        return value

    def _waited(self, timeout_s: float | None) -> T | None:
        bell = threading.Lock()
        bell.acquire()

        def ring(_: T) -> None:
            bell.release()

        self.then(ring)
        if not bell.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            self._forget(ring)
        # Not what the bell says: it may have happened as the time ran out.
        return self.value

    def _forget(self, callback: Callable[[T], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


def _call(callback: Callable[[T], object], value: T) -> None:
    """A listener's mistake is its own."""
    try:
        callback(value)
    except Exception:
        log.exception("callback-failed callback=%r", callback)
