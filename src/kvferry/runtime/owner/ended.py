"""Ended rooms of an endpoint, and which of them were the slowest of the last minutes.

On a busy endpoint the last rooms are those of a second, and the one that somebody will ask for
is older. So the slowest of every half minute are kept by themselves. Time is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappush, heapreplace, nlargest
from itertools import count
from math import ceil, inf

from kvferry.ids import Room
from kvferry.runtime.telemetry.tags import RoomTag

# How far back the slowest rooms are looked for.
SLOW_S = 300.0
# They are kept in parts of so many seconds, and so many of each.
PART_S = 30.0
MOST_OF_A_PART = 8

# When it ended, how many seconds after it began, which room, and whose.
EndedRoom = tuple[float, float, Room, RoomTag]


class SlowRooms:
    """The slowest rooms of each part of the last ``SLOW_S`` seconds, and of what was begun of it.

    Nothing that is asked for is missing: the slowest of all are among the slowest of their part.
    """

    def __init__(self) -> None:
        # Heaps with the quickest first. The number keeps rooms, which have no order, uncompared.
        self._parts: deque[tuple[float, list[tuple[float, int, EndedRoom]]]]
        self._parts = deque(maxlen=ceil(SLOW_S / PART_S) + 1)
        self._numbers = count()
        # What is no slower than this, and ended before that, need not be added.
        self.least_s, self.until = -inf, -inf
        self.rooms: set[Room] = set()

    def add(self, ended: EndedRoom) -> None:
        """A room has ended, later than those before it."""
        at, seconds, _, _ = ended
        if at >= self.until:
            self._parts.append((at, []))
            self.until = (at // PART_S + 1) * PART_S
        heap = self._parts[-1][1]
        if len(heap) < MOST_OF_A_PART:
            heappush(heap, (seconds, next(self._numbers), ended))
        elif seconds > heap[0][0]:
            heapreplace(heap, (seconds, next(self._numbers), ended))
        self.least_s = heap[0][0] if len(heap) == MOST_OF_A_PART else -inf
        self.rooms = {room for _, _, room, _ in self}

    def __iter__(self) -> Iterator[EndedRoom]:
        return (ended for _, heap in self._parts for _, _, ended in heap)

    def slowest(self, now: float, most: int = MOST_OF_A_PART) -> list[EndedRoom]:
        """The slowest of the last ``SLOW_S`` seconds, the slowest first."""
        since = (now - SLOW_S) // PART_S * PART_S
        late = (ended for ended in self if ended[0] >= since)
        return nlargest(most, late, key=lambda ended: ended[1])
