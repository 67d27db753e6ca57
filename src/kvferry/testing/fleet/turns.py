"""Many rooms at one rank, a turn at a time: orders in, news out, bytes checked on the way.

For soaks, where rooms begin and end by the thousand. Pages are sealed when a room is
released and looked at again when another room gets them: whoever writes into memory
that was released is found out.
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
    """A room as a rank is told of it."""

    room: Room
    content: Content
    prefill: str
    deadline_s: float
    chunk: int

    @property
    def request(self) -> Request:
        """How long it is, and what is cached."""
        return self.content.request


class RoomOrder(NamedTuple):
    """Something to do: ``receive``, ``begin``, ``rest`` or ``abort``."""

    verb: str
    work: TurnWork


class News(NamedTuple):
    """A room has ended (with what was wrong, if anything was), or was released."""

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
        self._heard: deque[News] = deque()
        self._seals: dict[RoomPages, int] = {}
        self._problems: list[News] = []

    def turn(self, orders: Iterable[RoomOrder]) -> list[News]:
        """Do these things, and tell what has happened since the last turn."""
        for verb, work in orders:
            try:
                getattr(self, f"_{verb}")(work)
            except KvferryError as error:
                self._problems.append(News(work.room, None, f"{verb}: {error}"))
        found, self._problems = self._problems, []
        while self._heard:
            found.append(self._examined(self._heard.popleft()))
        return found

    def unsealed(self) -> str:
        """What was written after it was released, at last."""
        return "; ".join(filter(None, map(self._broken, list(self._seals))))

    # ------------------------------------------------------------ orders

    def _keep(self, work: TurnWork, handle: Incoming | Outgoing) -> None:
        self._handles[work.room], self._works[work.room] = handle, work
        handle.on_end(lambda outcome: self._heard.append(News(work.room, outcome)))
        handle.on_release(lambda: self._heard.append(News(work.room)))

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
        self._keep(work, handle)

    def _begin(self, work: TurnWork) -> None:
        """Open a room and push the first half of its chunks."""
        end = work.request.num_tokens
        self._pools.fill(work.content.seed, work.content.where, range(end), states=True)
        self._keep(work, self._endpoint.open(work.room, deadline_s=work.deadline_s))
        chunks = [(at, min(at + work.chunk, end)) for at in range(0, end, work.chunk)]
        half = len(chunks) // 2
        self._pushes[work.room] = chunks[half:]
        self._push(work, chunks[:half])

    def _rest(self, work: TurnWork) -> None:
        """Push the other half and close."""
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

    def _examined(self, news: News) -> News:
        """Compare what has arrived, and seal what was released."""
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
        """Look at what the pages were left as, before they are used again."""
        taken = {*where.pages}
        touched = [s for s in self._seals if s.row == where.row or not taken.isdisjoint(s.pages)]
        for seal in touched:
            problem = self._broken(seal)
            if problem:
                self._problems.append(News(room, None, problem))
            del self._seals[seal]
            self._seal_rest(seal, where, taken)

    def _seal_rest(self, seal: RoomPages, where: RoomPages, taken: set[int]) -> None:
        """What another room does not get stays sealed."""
        rest = tuple(itertools.filterfalse(taken.__contains__, seal.pages))
        row = None if seal.row == where.row else seal.row
        left = RoomPages(rest, row)
        if rest or row is not None:
            self._seals[left] = self._pools.checksum(left)

    def _broken(self, seal: RoomPages) -> str:
        good = self._pools.checksum(seal) == self._seals[seal]
        return "" if good else f"pages {seal.pages} or row {seal.row} changed after their release"
