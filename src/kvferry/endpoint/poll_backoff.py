"""Short sleeps, for threads that look again soon.

Linux lets a thread sleep 50 µs longer than it asked, so that timers can be handled together.
Who waits 30 µs for a GPU would sleep for three times that.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000

# Those that this process may use, which in a container or under taskset are not all.
_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Looking often costs a core that may be needed.
CORES_TO_SPARE = (_NUM_CORES or 1) >= 8
# The shortest sleep that is worth it.
NAP_S = 30e-6 if CORES_TO_SPARE else 100e-6
# How much of the time that something has taken so far may pass before it is looked at again.
PART = 1 / 16
MOST_S = 5e-3


def pause(taken_s: float) -> float:
    """How long to sleep until the next look at something that has taken so long.

    Short at first and then longer and longer: the end of what is short is seen within
    microseconds, and what takes long costs little and is seen late by a small part of its time.
    """
    return min(max(NAP_S, PART * taken_s), MOST_S)


def set_timer_slack() -> None:
    """Let this thread's sleeps end when they should, where that can be asked for."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
