"""Rooms that a target will not receive, until every source that waits for an offer knows it.

A room may end at its target before an offer reached some source: the link was not up yet, or the
engine never asked for the room. That source would hold the request's pages until its deadline.
So it is told with an ``Abort``, repeated until it answers ``Drained`` or its link is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvferry.ids import Generation, Room
from kvferry.protocol.endpoint import Link
from kvferry.protocol.outcome import Failure
from kvferry.protocol.states import LinkState


@dataclass(slots=True, eq=False)
class Declined:
    """One room that one source is told of. ``said_at`` is when it was told last."""

    link: Link
    room: Room
    generation: Generation
    failure: Failure
    said_at: float = -inf


class Declines:
    """What is still to be said. Beyond ``limit`` the oldest is given up; its source waits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[tuple[Link, Room, Generation], Declined] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, declined: Declined) -> None:
        """Have a source told, now or when its link is up."""
        self._waiting[declined.link, declined.room, declined.generation] = declined
        if len(self._waiting) > self._limit:
            del self._waiting[next(iter(self._waiting))]

    def answered(self, link: Link, room: Room, generation: Generation) -> None:
        """The source has let go of the room."""
        self._waiting.pop((link, room, generation), None)

    def lost(self, link: Link) -> None:
        """A source that can't be told finds out by its own deadline."""
        for key in [key for key in self._waiting if key[0] is link]:
            del self._waiting[key]

    def due(self, now: float, resend_s: float) -> list[Declined]:
        """Those to say now, because they were not said, or not answered in time."""
        return [
            one
            for one in self._waiting.values()
            if one.link.state is LinkState.UP and now >= one.said_at + resend_s
        ]

    def timers(self, resend_s: float) -> Iterator[float]:
        """When each of them has to be said again."""
        for one in self._waiting.values():
            if one.link.state is LinkState.UP:
                yield one.said_at + resend_s

    def check(self) -> None:
        """Nothing waits for a link that is over, and the limit holds."""
        assert len(self._waiting) <= self._limit
        for one in self._waiting.values():
            assert one.link.state in (LinkState.GREETING, LinkState.UP), one
