"""A result that is set once, by any thread, and waited for or observed by others.

``concurrent.futures.Future`` does the same with a condition and several locks. Each room has two
results at each end, and the loop reads them with every frame, so this class is lighter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("kvferry.endpoint")

T = TypeVar("T")


class OneTimeResult(Generic[T]):
    """A value that is None until ``set``, and does not change afterwards."""

    __slots__ = ("_callbacks", "_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[T], object]] = []
        self.value: T | None = None

    def set(self, value: T) -> bool:
        """Set the value and run the callbacks on this thread. Return False if it was set before."""
        with self._lock:
            if self.value is not None:
                return False
            self.value = value
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, value)
        return True

    def add_callback(self, callback: Callable[[T], object]) -> None:
        """Call ``callback`` with the value when it is set, or now if it is."""
        with self._lock:
            if self.value is None:
                self._callbacks.append(callback)
                return
            value = self.value
        _call(callback, value)

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the value and return it. Raises ``TimeoutError``."""
        if self.value is None:
            self._block(timeout_s)
        # Read the value rather than trust the wait: it may have been set as the time ran out.
        if self.value is None:
            raise TimeoutError
        return self.value

    def _block(self, timeout_s: float | None) -> None:
        is_set = threading.Lock()
        is_set.acquire()

        def wake(_: T) -> None:
            is_set.release()

        self.add_callback(wake)
        if not is_set.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            with self._lock:
                if wake in self._callbacks:
                    self._callbacks.remove(wake)


def _call(callback: Callable[[T], object], value: T) -> None:
    """Run a callback and log what it raises, so that it cannot stop the loop."""
    try:
        callback(value)
    except Exception:
        log.exception("callback-failed callback=%r", callback)
