"""Exponential backoff with jitter."""

from __future__ import annotations

import random

# Its own generator, so that an application's seeded one is not disturbed.
_JITTER = random.Random()


class Backoff:
    """How long to wait after each consecutive error: doubling up to a limit, with jitter."""

    FIRST_S, MOST_S = 0.1, 5.0

    def __init__(self) -> None:
        self._num_errors = 0

    @property
    def is_first(self) -> bool:
        """Whether there was exactly one error since the last success."""
        return self._num_errors == 1

    @property
    def has_errors(self) -> bool:
        """Whether there was an error since the last success."""
        return self._num_errors > 0

    def next_s(self) -> float:
        """Count one more error and return the seconds to wait."""
        longest = min(self.MOST_S, self.FIRST_S * (1 << min(self._num_errors, 16)))
        self._num_errors += 1
        return longest * _JITTER.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Record a success."""
        self._num_errors = 0
