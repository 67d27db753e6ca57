"""Preloaded modules: the fork server imports them once for every rank's process.

Imports and compilation cost a second of processor time, a fork a few milliseconds. The heap is
frozen before the forks, so that no rank's garbage collection goes through all that was imported.
A transport's package is left to the rank: some start threads when they are imported, and threads
do not survive a fork.
"""

from kvferry.endpoint.freeze_gc import freeze_gc
from kvferry.memory.warm import warm_up
from kvferry.testing.fleet import worker

warm_up()
freeze_gc()
__all__ = ["worker"]
