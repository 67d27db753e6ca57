"""Modules that the fork server loads once for all ranks. Starts no thread and uses no GPU."""

from __future__ import annotations

import contextlib

import kvferry.reference.ranks.processes
import kvferry.reference.transfer.extensions  # noqa: F401 - for the forked ranks
from kvferry import KvferryError, warm_up

# A rank whose copy kernels cannot be compiled reports it itself.
with contextlib.suppress(KvferryError):
    warm_up()
