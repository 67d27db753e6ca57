"""Staging memory: its allocation, and how it is cut into slots.

The protocol decides who may write into which slot: ``protocol.credits`` for a target's slots,
``protocol.slots`` for a source's own.
"""

from kvferry.memory.staging.buffers import Buffer, allocate
from kvferry.memory.staging.pool import SlotPool, slots_for

__all__ = ["Buffer", "SlotPool", "allocate", "slots_for"]
