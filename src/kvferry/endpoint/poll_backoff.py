"""Poll backoff: how long to sleep between two looks at something that has no wakeup.

By default Linux ends a sleep up to 50 µs late, so that it can group timers. A 30 µs sleep would
then take almost three times as long; ``set_timer_slack`` prevents that.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000

# Cores that this process may use: fewer than the machine's in a container or under taskset.
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Frequent polling takes a core, so it is limited where cores are scarce.
CORES_TO_SPARE = (_NUM_CORES or 1) >= 8
MIN_SLEEP_S = 30e-6 if CORES_TO_SPARE else 100e-6
# Fraction of the time waited so far that may pass until the next look.
FRACTION = 1 / 16
MAX_SLEEP_S = 5e-3


def backoff_s(waited_s: float) -> float:
    """Return the seconds to sleep before the next look at something that has run ``waited_s``.

    The sleep grows with the wait: the end of a short operation is seen within microseconds, and
    that of a long one late by a small fraction of its duration.
    """
    return min(max(MIN_SLEEP_S, FRACTION * waited_s), MAX_SLEEP_S)


def set_timer_slack() -> None:
    """Make the calling thread's sleeps end within 1 µs of their time, where Linux allows it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
