"""Aborts for rooms that a target never offered to a source.

A room may end at its target before an offer has reached some source: the link was not up yet, or
the engine never asked for the room. Without a message that source would hold the request's pages
until its deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from kvferry.ids import Generation, Room
from kvferry.protocol.events import Outbox
from kvferry.protocol.links import Link, Links
from kvferry.protocol.messages import Abort
from kvferry.protocol.outcome import Failure
from kvferry.protocol.states import LinkState


@dataclass(slots=True, eq=False)
class Declined:
    """A room to abort at one source. ``sent_at`` is when the Abort was last sent."""

    link: Link
    room: Room
    generation: Generation
    failure: Failure
    sent_at: float = -inf


class Declines:
    """The latest ``max_early_rooms`` Aborts, repeated until Drained or until the link is lost."""

    def __init__(self, links: Links, outbox: Outbox) -> None:
        self._links = links
        self._outbox = outbox
        self._limit = links.config.max_early_rooms
        self.waiting: dict[tuple[Link, Room, Generation], Declined] = {}

    def add(self, declined: Declined) -> None:
        """Queue an Abort. It is due now, or when its link is up."""
        self.waiting[declined.link, declined.room, declined.generation] = declined
        if len(self.waiting) > self._limit:
            del self.waiting[next(iter(self.waiting))]

    def answered(self, link: Link, room: Room, generation: Generation) -> None:
        """Remove the Abort of a room that its source has released."""
        self.waiting.pop((link, room, generation), None)

    def lost(self, link: Link) -> None:
        """Remove the Aborts of a lost source, which releases its rooms at their deadlines."""
        for key in [key for key in self.waiting if key[0] is link]:
            del self.waiting[key]

    def send(self) -> None:
        """Send the Aborts that are new, or unanswered for ``resend_s``."""
        now = self._outbox.now
        for one in list(self._sendable()):
            if now >= one.sent_at + self._links.config.resend_s:
                one.sent_at = now
                abort = Abort(one.room, one.generation, one.failure, accepted=False)
                self._links.send(one.link, abort)

    def timers(self) -> Iterator[float]:
        """Yield when each Abort is due again."""
        return (one.sent_at + self._links.config.resend_s for one in self._sendable())

    def _sendable(self) -> Iterator[Declined]:
        return (one for one in self.waiting.values() if one.link.state is LinkState.UP)

    def check(self) -> None:
        """Check the limit, and that no Abort waits for a lost link."""
        assert len(self.waiting) <= self._limit
        for one in self.waiting.values():
            assert one.link.state in (LinkState.GREETING, LinkState.UP), one
