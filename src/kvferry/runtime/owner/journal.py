"""The journal of an endpoint: the steps of its rooms as they come, in pages of plain values.

A step is five places of the open page: when, what, of which room, with whom (at the beginning:
whose room it is), and what else belongs to it. So writing one down costs no look-up. A full page
is packed into one value, because thousands of small ones that stay cost more than making them:
whatever is made next lies in cold memory. When a page is forgotten, the steps of rooms that must
not be are put aside. Belongs to the owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain, starmap
from typing import Any, NamedTuple

import msgspec

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory, StoryStep
from kvferry.runtime.telemetry.tags import RoomTag

# Steps one after another, each in its places.
Steps = list[Any]
Step = tuple[Any, ...]
# Some of these rooms.
Choice = Callable[[Set[Room]], Set[Room]]

WIDE = 5
HALF = MAX_STORY_STEPS // 2 * WIDE
NUM_PAGES = 8

BEGINS = frozenset((Moment.OPENED, Moment.ASKED))
ENDS = frozenset((Moment.DONE, Moment.FAILED))
OVER = ENDS | {Moment.RELEASED}

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list).decode


class Page(NamedTuple):
    """A full page, and which rooms it tells of."""

    rooms: set[Room]
    packed: bytes

    def steps(self) -> Iterator[Step]:
        """With texts and lists for what they were."""
        return _each(_unpack(self.packed))


class Journal:
    """The last ``most_steps`` steps or somewhat more.

    Steps are written by adding their places to ``open``.
    """

    def __init__(self, most_steps: int) -> None:
        self.open: Steps = []
        self._most_places = max(1, most_steps // NUM_PAGES) * WIDE
        self._pages: deque[Page] = deque()
        # What stood in pages that are forgotten.
        self._aside: dict[Room, Steps] = {}

    @property
    def is_full(self) -> bool:
        """Whether the page should be turned."""
        return len(self.open) >= self._most_places

    def turn_page(self, kept: Choice) -> None:
        """Begin another page. Of the rooms that ``kept`` chooses nothing is forgotten."""
        page, self.open = self.open, []
        self._pages.append(Page(set(page[2::WIDE]), _pack(page)))
        if len(self._pages) > NUM_PAGES:
            self._forget(self._pages.popleft(), kept)

    def _forget(self, page: Page, kept: Choice) -> None:
        if self._aside:
            aside = set(self._aside)
            for room in aside - kept(aside):
                if not any(room in page.rooms for page in self._pages):
                    del self._aside[room]
        saved = kept(page.rooms) | (self._aside.keys() & page.rooms)
        for step in page.steps() if saved else ():
            if step[2] in saved:
                self._aside.setdefault(step[2], []).extend(_typed(*step))
        for room in saved:
            steps = self._aside[room] = _last_attempt(self._aside[room])
            if len(steps) > 4 * HALF:
                shorten(steps)

    def told(self, wanted: Callable[[Room], bool]) -> dict[Room, Steps]:
        """The steps of those rooms, of each since its last beginning."""
        found = {room: list(steps) for room, steps in self._aside.items() if wanted(room)}
        packed = (step for page in self._pages for step in page.steps() if wanted(step[2]))
        fresh = (step for step in _each(self.open) if wanted(step[2]))
        for step in chain(starmap(_typed, packed), fresh):
            found.setdefault(step[2], []).extend(step)
        begun = {
            room: steps for room, steps in found.items() if not BEGINS.isdisjoint(steps[1::WIDE])
        }
        return {room: _last_attempt(steps) for room, steps in begun.items()}

    def ended_since(self, since: float) -> dict[Room, Steps]:
        """The steps of the rooms that ended since then."""
        steps = chain(
            *map(_each, self._aside.values()),
            *(page.steps() for page in self._pages),
            _each(self.open),
        )
        late = {room for at, moment, room, _, _ in steps if moment in ENDS and at >= since}
        return self.told(late.__contains__)


def _last_attempt(steps: Steps) -> Steps:
    """Since the attempt before the last beginning, for an id may be used again."""
    moments = steps[1::WIDE]
    begun = max((i for i, moment in enumerate(moments) if moment in BEGINS), default=0)
    over = (i + 1 for i, moment in enumerate(moments[:begun]) if moment in OVER)
    return steps[max(over, default=0) * WIDE :]


def _each(steps: Iterable[Any]) -> Iterator[Step]:
    places = iter(steps)
    return zip(*[places] * WIDE, strict=True)


def _typed(at: float, moment: str | None, room: Room, who: Any, more: Any) -> Step:
    """A step as it was before it was packed; lists stand for more than one type."""
    if moment is None:
        return at, moment, room, who, more
    kind = Moment(moment)
    if who is not None:
        who = RoomTag(*who) if kind in BEGINS else Peer(*who)
    if isinstance(more, list):
        more = Span(*more) if kind is Moment.PUSHED else tuple(more)
    return at, kind, room, who, more


def shorten(steps: Steps) -> None:
    """Leave the beginning and the end, and between them a place that says how many are missing."""
    middle = steps[HALF:-HALF]
    missing = sum(1 if step[1] is not None else step[4] for step in _each(middle))
    steps[HALF:-HALF] = (middle[0], None, middle[2], None, missing)


def story_of(endpoint: str, role: str, room: Room, steps: Steps) -> RoomStory:
    """As a value that can be shown and sent."""
    if len(steps) > 2 * HALF:
        shorten(steps)
    each = list(_each(steps))
    tag: RoomTag = next(step[3] for step in each if step[1] in BEGINS)
    told = [_step(*step) for step in each if step[1] is not None]
    return RoomStory(
        endpoint=endpoint,
        role=role,
        room=str(room),
        steps=tuple(sorted(told, key=lambda step: step.at)),
        request=tag.request,
        traceparent=tag.traceparent,
        left_out=sum(step[4] for step in each if step[1] is None),
    )


def _step(at: float, moment: Moment, _: Room, who: Peer | RoomTag | None, more: Any) -> StoryStep:
    """As a value: what stands behind the moment depends on it."""
    match who, more:
        case _, Span(first=first, end=end):
            return StoryStep(moment, at, detail=f"tokens {first} to {end}")
        case _, str():
            return StoryStep(moment, at, detail=more)
        case Peer(), bool():
            return StoryStep(moment, at, str(who), more)
        case Peer(), (seconds, num_bytes, path):
            return StoryStep(moment, at, str(who), False, seconds, num_bytes, str(path))
        case _:
            return StoryStep(moment, at)
