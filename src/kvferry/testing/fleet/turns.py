"""Turns of one rank in a soak: orders in, news out, with every byte checked.

Pages get a checksum (a seal) when a room is released, and are compared with it when another room
gets them, so a late write into released memory is found.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.outgoing import Outgoing
from kvferry.errors import KvferryError
from kvferry.ids import Room
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Done, Outcome
from kvferry.testing.fleet.pools import Content, RoomPages, TestPools


class TurnWork(NamedTuple):
    """A room as a soak describes it to a rank."""

    room: Room
    content: Content
    prefill: str
    deadline_s: float
    chunk: int

    @property
    def request(self) -> Request:
        """The room's request."""
        return self.content.request


class RoomOrder(NamedTuple):
    """An order: ``receive``, ``begin``, ``rest`` or ``abort`` a room."""

    verb: str
    work: TurnWork


class News(NamedTuple):
    """The end of a room, with its outcome, or its release, without; and any problem."""

    room: Room
    outcome: Outcome | None = None
    problem: str = ""


class Turns:
    """The rooms of one rank."""

    def __init__(
        self, endpoint: Any, pools: TestPools, pages_of: Callable[[RoomPages, range], Any]
    ) -> None:
        self._endpoint = endpoint
        self._pools = pools
        self._pages_of = pages_of
        self._handles: dict[Room, Incoming | Outgoing] = {}
        self._works: dict[Room, TurnWork] = {}
        self._pushes: dict[Room, list[tuple[int, int]]] = {}
        self._news: deque[News] = deque()
        self._seals: dict[RoomPages, int] = {}
        self._problems: list[News] = []

    def turn(self, orders: Iterable[RoomOrder]) -> list[News]:
        """Carry out the orders, and return what has happened since the last turn."""
        for verb, work in orders:
            try:
                getattr(self, f"_{verb}")(work)
            except KvferryError as error:
                self._problems.append(News(work.room, None, f"{verb}: {error}"))
        found, self._problems = self._problems, []
        while self._news:
            found.append(self._examine(self._news.popleft()))
        return found

    def unsealed(self) -> str:
        """Return what was written into memory after its last release."""
        return "; ".join(filter(None, map(self._check_seal, list(self._seals))))

    # ------------------------------------------------------------ orders

    def _add(self, work: TurnWork, handle: Incoming | Outgoing) -> None:
        self._handles[work.room], self._works[work.room] = handle, work
        handle.on_end(lambda outcome: self._news.append(News(work.room, outcome)))
        handle.on_release(lambda: self._news.append(News(work.room)))

    def _receive(self, work: TurnWork) -> None:
        where = work.content.where
        self._break_seals(work.room, where)
        self._pools.clear_room(where)
        handle = self._endpoint.receive(
            work.room,
            prefill=work.prefill,
            tokens=work.request.num_tokens,
            prefix=work.request.prefix,
            pages=where.pages,
            states=where.row,
            deadline_s=work.deadline_s,
        )
        self._add(work, handle)

    def _begin(self, work: TurnWork) -> None:
        """Open a room, and push the first half of its chunks."""
        end = work.request.num_tokens
        self._pools.fill(work.content.seed, work.content.where, range(end), states=True)
        self._add(work, self._endpoint.open(work.room, deadline_s=work.deadline_s))
        chunks = [(at, min(at + work.chunk, end)) for at in range(0, end, work.chunk)]
        half = len(chunks) // 2
        self._pushes[work.room] = chunks[half:]
        self._push(work, chunks[:half])

    def _rest(self, work: TurnWork) -> None:
        """Push the other half of the chunks, and close the room."""
        handle = self._handles.get(work.room)
        if isinstance(handle, Outgoing):
            self._push(work, self._pushes[work.room])
            handle.close(b"m", states=work.content.where.row, tokens=work.request.num_tokens)

    def _push(self, work: TurnWork, chunks: list[tuple[int, int]]) -> None:
        handle = self._handles[work.room]
        assert isinstance(handle, Outgoing)
        for tokens in chunks:
            handle.push(tokens, self._pages_of(work.content.where, range(*tokens)))

    def _abort(self, work: TurnWork) -> None:
        handle = self._handles.get(work.room)
        if handle:
            handle.abort()

    # ------------------------------------------------------------ news

    def _examine(self, news: News) -> News:
        """Check the bytes of a room that is done, and seal those of a released room."""
        work = self._works[news.room]
        is_target = isinstance(self._handles[news.room], Incoming)
        if news.outcome is None:
            if is_target:
                self._seals[work.content.where] = self._pools.checksum(work.content.where)
            for table in (self._handles, self._works, self._pushes):
                table.pop(news.room, None)
        elif is_target and isinstance(news.outcome, Done):
            return news._replace(problem=self._pools.room_problem(work.content) or "")
        return news

    def _break_seals(self, room: Room, where: RoomPages) -> None:
        """Check the seals of pages that another room gets."""
        taken = {*where.pages}
        touched = [s for s in self._seals if s.row == where.row or not taken.isdisjoint(s.pages)]
        for seal in touched:
            problem = self._check_seal(seal)
            if problem:
                self._problems.append(News(room, None, problem))
            del self._seals[seal]
            self._seal_rest(seal, where, taken)

    def _seal_rest(self, seal: RoomPages, where: RoomPages, taken: set[int]) -> None:
        """Seal again the pages that the other room does not get."""
        rest = tuple(itertools.filterfalse(taken.__contains__, seal.pages))
        row = None if seal.row == where.row else seal.row
        left = RoomPages(rest, row)
        if rest or row is not None:
            self._seals[left] = self._pools.checksum(left)

    def _check_seal(self, seal: RoomPages) -> str:
        good = self._pools.checksum(seal) == self._seals[seal]
        return "" if good else f"pages {seal.pages} or row {seal.row} changed after their release"
