"""Preloaded modules: what every rank's process needs, loaded once by the server that forks them.

Importing and compiling cost a second of processor time, a fork a few milliseconds.
A transport's package is left to the rank, because some of them start threads when
they are loaded, and threads don't survive a fork.
"""

from kvferry.memory.copy.cpu import warm_up
from kvferry.testing.fleet import worker

warm_up()
__all__ = ["worker"]
