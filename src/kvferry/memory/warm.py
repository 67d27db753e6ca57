"""Preparation of the compiled loops that work on host memory."""

from __future__ import annotations

import time

from kvferry.memory.checksum import cpu as checksum
from kvferry.memory.copy import cpu as copy


def warm_up() -> float:
    """Compile the loops, or load them from the disk cache. Return the seconds taken.

    Endpoints do it when they are made. A process that forks others may do it once for all.
    """
    begin = time.perf_counter()
    copy.warm_up()
    checksum.warm_up()
    return time.perf_counter() - begin
