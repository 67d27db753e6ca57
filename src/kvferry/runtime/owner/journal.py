"""The journal of an endpoint: what happens to its rooms as it comes, in pages of plain values.

An entry is five places of the open page: when, what, of which room, with whom, and what else
belongs to it. So writing one down costs no look-up. Frames that came or left together are one
entry, the message that they were in, and understood when somebody asks. When a room began, and
whose it is, stands at its end; before that its handle knows. A full page is packed into one
value, because thousands of small ones that stay cost more than making them: whatever is made
next lies in cold memory.
When a page is forgotten, the steps of rooms that must not be are put aside. Belongs to the
owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from itertools import chain, starmap
from math import inf
from typing import Any, NamedTuple

import msgspec

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import Moment
from kvferry.protocol.codec import gist
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Arrived,
    Close,
    Complete,
    Drained,
    Grant,
    Nudge,
    Offer,
    RoomMessage,
    Want,
)
from kvferry.runtime.bundles import MAX_FRAMES, Message, unbundle
from kvferry.runtime.owner.telling import ENDS, HALF, WIDE, Step, Steps, each, last_end, shorten
from kvferry.runtime.telemetry.tags import RoomTag

NUM_PAGES = 4
# Stands for a moment where a message is written down as it is.
BUNDLE = ""
# Where frames are longer, only what is understood is kept: offers have thousands of pages.
MOST_FRAME_BYTES = 512

MESSAGES: dict[type[RoomMessage], Moment] = {
    Offer: Moment.OFFERED,
    Accept: Moment.ACCEPTED,
    Want: Moment.WANTED,
    Grant: Moment.GRANTED,
    Arrived: Moment.ARRIVED,
    Nudge: Moment.NUDGED,
    Close: Moment.CLOSED,
    Complete: Moment.COMPLETED,
    Abort: Moment.ABORTED,
    Drained: Moment.DRAINED,
}

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list).decode


class Page(NamedTuple):
    """A full page: what was written in that time.

    ``early`` are the rooms that at its end had been offered, and had not begun here.
    """

    since: float
    until: float
    early: Set[Room]
    packed: bytes

    def entries(self) -> Iterator[Step]:
        """As they were written."""
        return starmap(_typed, each(_unpack(self.packed)))


class Journal:
    """The last ``most_steps`` steps or somewhat more.

    An entry is written by adding its places to ``open``.
    """

    def __init__(self, most_steps: int) -> None:
        self.open: Steps = []
        self._most_places = max(1, most_steps // NUM_PAGES) * WIDE
        # Of bundles, for their frames after the first.
        self._more_places = 0
        self._turned = -inf
        self._pages: deque[Page] = deque()
        # Who was early at the end of the last page that is forgotten.
        self._offered_before: Set[Room] = frozenset()
        # What stood in pages that are forgotten.
        self._aside: dict[Room, Steps] = {}
        # Those of them that have no end there, and when they were last kept.
        self._unended: dict[Room, float] = {}

    def write_message(self, at: float, peer: Peer | None, message: Message) -> None:
        """Said to a peer, or heard."""
        data, frames = message
        if len(data) > MOST_FRAME_BYTES * len(frames) or len(frames) > MAX_FRAMES:
            self.open.extend(chain.from_iterable(_understood(at, peer, frames)))
        else:
            self.open += (at, BUNDLE, None, peer, data)
            self._more_places += WIDE * (len(frames) - 1)

    @property
    def is_full(self) -> bool:
        """Whether the page should be turned."""
        return len(self.open) + self._more_places >= self._most_places

    # ------------------------------------------------------------ pages

    def turn_page(self, now: float, early: Set[Room]) -> Page | None:
        """Begin another page. The oldest, which is one too many, has to be forgotten."""
        self._pages.append(Page(self._turned, now, early, _pack(self.open)))
        self.open, self._more_places, self._turned = [], 0, now
        return self._pages.popleft() if len(self._pages) > NUM_PAGES else None

    def forget(self, page: Page, kept: Set[Room], saved: Set[Room]) -> None:
        """Of the rooms that are kept, put aside what the page has of those that are saved."""
        self._offered_before = page.early
        for room in self._aside.keys() - kept:
            # Whose end is not aside had it after it was last kept, if ever.
            if self._unended.get(room, -inf) < page.since:
                del self._aside[room]
                self._unended.pop(room, None)
        for room in self._unended.keys() & kept:
            self._unended[room] = self._turned
        wanted = saved | self._unended.keys()
        # Also of whom the page says nothing: that is known then.
        found: dict[Room, Steps] = {room: [] for room in wanted}
        for step in _steps(page.entries()) if wanted else ():
            if step[2] in wanted:
                found[step[2]].extend(step)
        for room, steps in found.items():
            self._put_aside(room, steps)

    def _put_aside(self, room: Room, more: Steps) -> None:
        steps = self._aside.setdefault(room, [])
        steps += more
        if last_end(steps) is None:
            self._unended.setdefault(room, self._turned)
        else:
            self._unended.pop(room, None)
        if len(steps) > 4 * HALF:
            shorten(steps)

    # ------------------------------------------------------------ what is known

    def knows_since(self, room: Room, begun: float) -> bool:
        """Whether nothing is forgotten of a room that began then and has ended."""
        if room in self._aside or not self._pages:
            return True
        return begun > self._pages[0].since and room not in self._offered_before

    def told(self, rooms: Set[Room]) -> dict[Room, Steps]:
        """The steps of those rooms, of all attempts that are known."""
        found = {room: list(self._aside[room]) for room in rooms & self._aside.keys()}
        for step in _steps(self._entries()):
            if step[2] in rooms:
                found.setdefault(step[2], []).extend(step)
        return found

    def ended_since(self, since: float) -> set[Room]:
        """The rooms that ended since then."""
        entries = chain(*map(each, self._aside.values()), self._entries())
        return {room for at, moment, room, _, _ in entries if moment in ENDS and at >= since}

    def _entries(self) -> Iterator[Step]:
        """Of all pages."""
        return chain(*(page.entries() for page in self._pages), each(self.open))


def _steps(entries: Iterable[Step]) -> Iterator[Step]:
    """With frames understood."""
    for entry in entries:
        at, moment, _, peer, message = entry
        if moment == BUNDLE:
            yield from _understood(at, peer, unbundle(message) or ())
        else:
            yield entry


def _understood(at: float, peer: Peer | None, frames: Iterable[bytes]) -> Iterator[Step]:
    """The steps that frames are which were said to a peer, or heard."""
    for said in map(gist, frames):
        if said is not None:
            yield at, MESSAGES[said.kind], said.room, peer or said.sender, peer is None


def _typed(at: float, moment: str, room: Room, who: Any, more: Any) -> Step:
    """An entry as it was before it was packed; lists stand for more than one type."""
    kind = Moment(moment) if moment else BUNDLE
    if who is not None:
        who = RoomTag(*who) if kind in ENDS else Peer(*who)
    if isinstance(more, list) and moment:
        more = Span(*more) if kind is Moment.PUSHED else tuple(more)
    return at, kind, room, who, more
