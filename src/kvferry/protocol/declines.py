"""Aborts for rooms that a target never offered to a source.

A room may end at its target before an offer reached some source: the link was not up yet, or the
engine never asked for the room. That source would hold the request's pages until its deadline.
``Declines`` keeps an ``Abort`` for it, repeated until it answers ``Drained`` or its link is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvferry.ids import Generation, Room
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Failure
from kvferry.protocol.states import LinkState


@dataclass(slots=True, eq=False)
class Declined:
    """A room to abort at one source. ``said_at`` is when the Abort was last sent."""

    link: Link
    room: Room
    generation: Generation
    failure: Failure
    said_at: float = -inf


class Declines:
    """Aborts that no source has answered yet; beyond ``limit`` the oldest is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[tuple[Link, Room, Generation], Declined] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, declined: Declined) -> None:
        """Queue an Abort; it leaves now, or when the link is up."""
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
        """Return the Aborts to send now: new ones, and those not answered within ``resend_s``."""
        return [
            one
            for one in self._waiting.values()
            if one.link.state is LinkState.UP and now >= one.said_at + resend_s
        ]

    def timers(self, resend_s: float) -> Iterator[float]:
        """Yield when each Abort is due again."""
        for one in self._waiting.values():
            if one.link.state is LinkState.UP:
                yield one.said_at + resend_s

    def check(self) -> None:
        """Nothing waits for a link that is over, and the limit holds."""
        assert len(self._waiting) <= self._limit
        for one in self._waiting.values():
            assert one.link.state in (LinkState.GREETING, LinkState.UP), one
