"""Writes that the owner has begun itself, and asks after until they are over.

It asks often at first and then less and less (``naps``). To have another thread do this would
cost two hand-offs, each longer than most writes take.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from kvferry.ids import Op
from kvferry.runtime.mover.mover import Flight, WriteEnd
from kvferry.runtime.naps import NAP_S, pause
from kvferry.transport.base import Transport

# A GPU writes a slot of some ten megabytes in less.
FRESH_S = 300e-6


class _Write(NamedTuple):
    """A write, and when to ask after it."""

    transport: Transport
    flight: Flight
    due: float


class Underway:
    """Writes of one owner that go on."""

    def __init__(self) -> None:
        self._writes: dict[Op, _Write] = {}

    def add(self, op: Op, transport: Transport, flight: Flight) -> None:
        """Ask after this one from now on."""
        self._writes[op] = _Write(transport, flight, flight.started + NAP_S)

    def ended(self, now: float) -> Iterator[WriteEnd]:
        """Those that are over, of those whose time has come."""
        for op in [op for op, write in self._writes.items() if write.due <= now]:
            transport, flight, _ = self._writes[op]
            ended = transport.look(op)
            if ended is None:
                self._writes[op] = _Write(transport, flight, now + pause(now - flight.started))
            else:
                del self._writes[op]
                yield flight.end(ended)

    def has_fresh(self, now: float) -> bool:
        """Whether one has begun so lately that it will be over soon."""
        return any(now < write.flight.started + FRESH_S for write in self._writes.values())

    def wakeup(self) -> float:
        """When to ask again."""
        return min((write.due for write in self._writes.values()), default=inf)
