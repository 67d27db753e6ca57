"""Rate limit for repeated events: show the first few, count the rest. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Window:
    began: float
    num_shown: int = 0
    num_hidden: int = 0


class Hidden(NamedTuple, Generic[K]):
    """How often a key was suppressed in its window."""

    key: K
    times: int


class Repeats(Generic[K]):
    """Shows the first ``burst`` events of each key in a window of ``window_s``, counts the others.

    Remembers at most ``most_keys`` keys; a new key ends the oldest window early.
    """

    def __init__(self, burst: int, window_s: float, most_keys: int = 1024) -> None:
        self._burst, self.window_s, self._most_keys = burst, window_s, most_keys
        # In the order in which they began.
        self._windows: dict[K, _Window] = {}

    def over(self, now: float) -> list[Hidden[K]]:
        """Return what was suppressed in windows that have ended, once."""
        ended: list[K] = []
        for key, window in self._windows.items():
            crowded = len(self._windows) - len(ended) > self._most_keys
            if now - window.began < self.window_s and not crowded:
                break
            ended.append(key)
        return self._pop(ended)

    def rest(self) -> list[Hidden[K]]:
        """Return what was suppressed in all windows, and forget them."""
        return self._pop(list(self._windows))

    def shows(self, key: K, now: float) -> bool:
        """Count one event; return whether to show it. Call ``over`` first."""
        window = self._windows.setdefault(key, _Window(now))
        if window.num_shown < self._burst:
            window.num_shown += 1
            return True
        window.num_hidden += 1
        return False

    def _pop(self, keys: list[K]) -> list[Hidden[K]]:
        windows = [(key, self._windows.pop(key)) for key in keys]
        return [Hidden(key, window.num_hidden) for key, window in windows if window.num_hidden]
