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
from itertools import chain
from math import inf
from typing import NamedTuple

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
from kvferry.runtime.bundles import MAX_FRAMES, Bundle, unbundle
from kvferry.runtime.owner.telling import ENDS, HALF, WIDE, Step, Steps, each, last_end, shorten
from kvferry.runtime.telemetry.tags import RoomTag

NUM_PAGES = 4
# Stands for a moment where a message is written down as it is.
BUNDLE = ""
# Where frames are longer, only what is understood is kept: offers have thousands of pages.
MOST_FRAME_BYTES = 512
# For so many rooms messages are searched for their names before they are understood.
MOST_NAMES = 32

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

    def steps_of(self, rooms: Set[Room]) -> Iterator[Step]:
        """The steps of these rooms."""
        return map(_typed, _steps(each(_unpack(self.packed)), rooms))

    def ends(self) -> Iterator[tuple[float, Room]]:
        """The rooms that ended then, and when each did."""
        return _ends(each(_unpack(self.packed)))


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

    def write_message(self, at: float, peer: Peer | None, message: Bundle) -> None:
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
        for step in page.steps_of(wanted) if wanted else ():
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
        pages = chain.from_iterable(page.steps_of(rooms) for page in self._pages)
        for step in chain(pages, _steps(each(self.open), rooms)):
            found.setdefault(step[2], []).extend(step)
        return found

    def ended_since(self, since: float) -> set[Room]:
        """The rooms that ended since then."""
        here = _ends(chain(*map(each, self._aside.values()), each(self.open)))
        pages = chain.from_iterable(page.ends() for page in self._pages)
        return {room for at, room in chain(here, pages) if at >= since}


def _ends(entries: Iterable[Step]) -> Iterator[tuple[float, Room]]:
    return ((at, room) for at, moment, room, _, _ in entries if moment in ENDS)


def _steps(entries: Iterable[Step], rooms: Set[Room]) -> Iterator[Step]:
    """The steps of these rooms, with frames understood where one of them may be meant."""
    names = [_pack(room) for room in rooms] if len(rooms) <= MOST_NAMES else None
    for entry in entries:
        at, moment, room, peer, message = entry
        if moment != BUNDLE:
            if room in rooms:
                yield entry
        elif names is None or any(name in message for name in names):
            for step in _understood(at, peer, unbundle(message) or ()):
                if step[2] in rooms:
                    yield step


def _understood(at: float, peer: Peer | None, frames: Iterable[bytes]) -> Iterator[Step]:
    """The steps that frames are which were said to a peer, or heard."""
    for said in map(gist, frames):
        if said is not None:
            yield at, MESSAGES[said.kind], said.room, peer or said.sender, peer is None


def _typed(step: Step) -> Step:
    """A step as it was before it was packed; lists stand for more than one type."""
    at, moment, room, who, more = step
    kind = Moment(moment)
    if isinstance(who, list):
        who = RoomTag(*who) if kind in ENDS else Peer(*who)
    if isinstance(more, list):
        more = Span(*more) if kind is Moment.PUSHED else tuple(more)
    return at, kind, room, who, more
