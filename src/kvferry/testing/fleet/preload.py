"""Preloaded modules: the fork server imports them once for every rank's process.

Imports and compilation cost a second of processor time, a fork a few milliseconds. A transport's
package is left to the rank: some start threads when they are imported, and threads do not survive a
fork.
"""

from kvferry.memory.copy.cpu import warm_up
from kvferry.testing.fleet import worker

warm_up()
__all__ = ["worker"]
