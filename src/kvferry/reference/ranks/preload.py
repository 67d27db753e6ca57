"""Modules that the fork server loads once for all ranks. Starts no thread and uses no GPU.

The heap is frozen before the forks, so that no rank's garbage collection goes through all that was
imported.
"""

from __future__ import annotations

import contextlib

import kvferry.reference.ranks.processes
import kvferry.reference.transfer.extensions  # noqa: F401 - for the forked ranks
from kvferry import KvferryError, freeze_gc, warm_up

# A rank whose copy kernels cannot be compiled reports it itself.
with contextlib.suppress(KvferryError):
    warm_up()
freeze_gc()
