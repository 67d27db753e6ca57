"""Preloaded modules: what each rank would load by itself, loaded by the server that forks them.

Nine ranks then start as quickly as two. Nothing here may start a thread or use a GPU.
"""

from __future__ import annotations

import contextlib

import kvferry.reference.ranks.processes
import kvferry.reference.transfer.decode
import kvferry.reference.transfer.prefill  # noqa: F401 - for those who are forked
from kvferry import KvferryError, warm_up

# A rank that copies and can't will say so itself.
with contextlib.suppress(KvferryError):
    warm_up()
