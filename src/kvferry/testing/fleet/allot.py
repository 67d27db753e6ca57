"""Allotment: which pages and state rows of an instance are taken, and by which room."""

from __future__ import annotations

from random import Random

from kvferry.ids import Room
from kvferry.testing.fleet.pools import RoomPages


class Allotment:
    """The free pages of one instance, the same at each of its ranks. Handed out in any order."""

    def __init__(self, num_pages: int, num_rows: int, page_tokens: int, rng: Random) -> None:
        self._page_tokens = page_tokens
        self._pages = list(range(num_pages))
        self._rows = list(range(num_rows))
        self._rng = rng
        self._taken: dict[Room, RoomPages] = {}

    def take(self, room: Room, num_tokens: int) -> RoomPages:
        """Pages and a row for a room, until ``give_back``."""
        num_pages = -(-num_tokens // self._page_tokens)
        if room in self._taken or not self.has(num_tokens):
            have = f"{len(self._pages)} pages and {len(self._rows)} rows"
            raise ValueError(f"room {room!r} wants {num_pages} pages, and {have} are free")
        self._rng.shuffle(self._pages)
        self._rng.shuffle(self._rows)
        pages = tuple(self._pages.pop() for _ in range(num_pages))
        self._taken[room] = RoomPages(pages, self._rows.pop())
        return self._taken[room]

    def give_back(self, room: Room) -> None:
        """The room is over and its memory was released, or the process that had it is gone."""
        where = self._taken.pop(room, None)
        if where:
            self._pages += where.pages
            assert where.row is not None
            self._rows.append(where.row)

    def has(self, num_tokens: int) -> bool:
        """Whether a room of that length could be taken on."""
        return num_tokens <= len(self._pages) * self._page_tokens and bool(self._rows)
