"""Rooms of a rank: their handles, their pages, and their outcomes."""

from __future__ import annotations

import time
from typing import Any

from kvferry.ids import Room
from kvferry.protocol.outcome import Outcome
from kvferry.testing.fleet.pools import RoomPages


class RankRooms:
    """The rooms of one rank, until it is told to forget them."""

    def __init__(self) -> None:
        self.handles: dict[Room, Any] = {}
        self.where: dict[Room, RoomPages] = {}
        self._ended_at: dict[Room, float] = {}

    def keep(self, room: Room, handle: Any) -> None:
        """A room has begun."""
        self.handles[room] = handle
        handle.on_end(lambda _: self._ended_at.__setitem__(room, time.monotonic()))

    def place(self, room: Room, where: RoomPages) -> None:
        """A room has these pages, with whatever is in them."""
        self.where[room] = where

    def forget(self, room: Room) -> None:
        """Drop what is kept of a room that is over."""
        for table in (self.handles, self._ended_at, self.where):
            table.pop(room, None)

    def rooms(self) -> list[Room]:
        """Return the rooms that were not forgotten."""
        return list(self.handles)

    def pages_of(self, room: Room) -> RoomPages:
        """Where a room is."""
        return self.where[room]

    def outcome(self, room: Room, timeout_s: float) -> Outcome:
        """How a room ended."""
        outcome: Outcome = self.handles[room].wait(timeout_s)
        return outcome

    def wait_released(self, room: Room, timeout_s: float) -> None:
        """Wait until a room's memory is free."""
        self.handles[room].wait_released(timeout_s)

    def abort(self, room: Room) -> None:
        """Give a room up."""
        self.handles[room].abort()

    def status(self, room: Room) -> int:
        """Where a room stands."""
        return int(self.handles[room].status)

    def released(self, room: Room) -> bool:
        """Whether a room's memory is free."""
        released: bool = self.handles[room].released
        return released

    def ended(self, room: Room) -> float:
        """When a room ended, by this machine's monotonic clock."""
        return self._ended_at[room]

    def metadata(self, room: Room) -> bytes:
        """Return the metadata that came with the close."""
        data: bytes = self.handles[room].metadata
        return data

    def bad_pages(self, room: Room) -> dict[str, list[int]]:
        """Return the pages that a failed room lacks."""
        found: dict[str, list[int]] = self.handles[room].bad_pages
        return found
