"""Staging memory: how it is cut into slots, and where it comes from.

Who may write into which slot is the protocol's affair (``protocol.credits`` for
a target's slots, ``protocol.slots`` for a source's own); nothing is allocated
or freed slot by slot here.
"""

from kvferry.memory.staging.buffers import Buffer, allocate
from kvferry.memory.staging.pool import SlotPool, slots_for

__all__ = ["Buffer", "SlotPool", "allocate", "slots_for"]
