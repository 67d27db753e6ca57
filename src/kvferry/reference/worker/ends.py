"""Ends of rooms, kept for whoever asks soon, and who waits for them.

The engine's thread tells, others ask and wait; a lock is between them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kvferry import KvferryError
from kvferry.reference.worker.jobs import RoomEnd

# Rooms whose end is remembered, and those who may wait for one at a time.
MAX_ENDS = 1024
MAX_WAITING = 1024

Told = Callable[[RoomEnd], None]


class TooManyWaiting(KvferryError):
    """Enough wait already; ask again later."""


class RoomEnds:
    """The ends of a worker's rooms."""

    def __init__(self, most_waiting: int = MAX_WAITING) -> None:
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, RoomEnd] = OrderedDict()
        self._waiting: dict[str, list[Told]] = {}
        self._num_waiting = 0

    def tell(self, end: RoomEnd) -> None:
        """A room has ended: remember it, and tell whoever waits, on this thread."""
        room = str(end.room)
        with self._lock:
            self._ends[room] = end
            while len(self._ends) > MAX_ENDS:
                self._ends.popitem(last=False)
            waiting = self._waiting.pop(room, [])
            self._num_waiting -= len(waiting)
        for told in waiting:
            told(end)

    def ask(self, room: str, told: Told) -> RoomEnd | None:
        """The end of a room; if it is not known, ``told`` is called with it, once, until ``leave``.

        Raises ``TooManyWaiting`` where it would have to wait and can't.
        """
        with self._lock:
            if (end := self._ends.get(room)) is not None:
                return end
            if self._num_waiting >= self._most_waiting:
                raise TooManyWaiting(f"{self._num_waiting} wait for rooms to end; ask again later")
            self._waiting.setdefault(room, []).append(told)
            self._num_waiting += 1
            return None

    def leave(self, room: str, told: Told) -> None:
        """Nobody waits there any more. Idempotent."""
        with self._lock:
            waiting = self._waiting.get(room, [])
            if told in waiting:
                waiting.remove(told)
                self._num_waiting -= 1
            if not waiting:
                self._waiting.pop(room, None)
