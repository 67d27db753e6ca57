"""Garbage: what a process has once it is ready need not be looked through again and again."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Let collections look only at what is made from now on. For a process that is all set up.

    A full one looks through everything, and holds up every thread of the process meanwhile:
    where torch is loaded for a tenth of a second, in the middle of a transfer.
    """
    gc.collect()
    gc.freeze()
