"""Excludes a process's long-lived objects from garbage collection."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Make the garbage collector skip all objects that exist now. Call it after start-up.

    A full collection visits every object and blocks every thread of the process: with torch
    loaded for a tenth of a second, possibly in the middle of a transfer.
    """
    gc.collect()
    gc.freeze()
