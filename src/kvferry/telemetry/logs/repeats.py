"""The same thing over and over is written a few times and then counted. Pure: time is a value."""

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
    """How often something was not shown in its window."""

    key: K
    times: int


class Repeats(Generic[K]):
    """Of each key the first ``burst`` are shown in a window of ``window_s``; the others count.

    At most ``most_keys`` are remembered; the oldest window ends early for a new one.
    """

    def __init__(self, burst: int, window_s: float, most_keys: int = 1024) -> None:
        self._burst, self.window_s, self._most_keys = burst, window_s, most_keys
        # In the order in which they began, so that those which are over stand in front.
        self._windows: dict[K, _Window] = {}

    def over(self, now: float) -> list[Hidden[K]]:
        """What was hidden in windows that have ended by now; each is told once."""
        ended: list[K] = []
        for key, window in self._windows.items():
            crowded = len(self._windows) - len(ended) > self._most_keys
            if now - window.began < self.window_s and not crowded:
                break
            ended.append(key)
        return self._told(ended)

    def rest(self) -> list[Hidden[K]]:
        """What is hidden and not told yet, because there is an end of it all."""
        return self._told(list(self._windows))

    def shows(self, key: K, now: float) -> bool:
        """Count one; say whether it is shown. Call ``over`` first."""
        window = self._windows.setdefault(key, _Window(now))
        if window.num_shown < self._burst:
            window.num_shown += 1
            return True
        window.num_hidden += 1
        return False

    def _told(self, keys: list[K]) -> list[Hidden[K]]:
        windows = [(key, self._windows.pop(key)) for key in keys]
        return [Hidden(key, window.num_hidden) for key, window in windows if window.num_hidden]
