"""Steps of a room as an owner writes them down: a flat list of plain values, later packed.

A step is four places of the list: when, what, with whom (at the beginning: whose room it is),
and what else belongs to it. What has ended well is packed: thousands of small values that stay
for a while cost more than writing them down, because whatever is made next lies in cold memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory, StoryStep
from kvferry.protocol.outcome import Failure
from kvferry.runtime.telemetry.tags import RoomTag

# The places of a story's steps, the tag first.
Steps = list[Any]

WIDE = 4
HALF = MAX_STORY_STEPS // 2 * WIDE

pack = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list).decode


def unpack(packed: bytes) -> Steps:
    """The steps of a room that has ended well."""
    return [place for step in _each(_decode(packed)) for place in _typed(*step)]


def _typed(at: float, moment: str | None, who: Any, more: Any) -> tuple[Any, ...]:
    """A step as it was before it was packed; lists stand for more than one type."""
    if moment is None:
        return at, moment, who, more
    kind = Moment(moment)
    if who is not None:
        who = RoomTag(*who) if kind in (Moment.OPENED, Moment.ASKED) else Peer(*who)
    if isinstance(more, list):
        more = Span(*more) if kind is Moment.PUSHED else tuple(more)
    return at, kind, who, more


def tag_of(steps: Steps | bytes) -> RoomTag:
    """Whose room it was; the first step is its beginning."""
    tag: RoomTag = (unpack(steps) if isinstance(steps, bytes) else steps)[2]
    return tag


def shorten(steps: Steps) -> None:
    """Leave the beginning and the end, and between them a place that says how many are missing."""
    middle = steps[HALF:-HALF]
    missing = sum(1 if moment is not None else more for _, moment, _, more in _each(middle))
    steps[HALF:-HALF] = (middle[0], None, None, missing)


def _each(steps: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    places = iter(steps)
    return zip(*[places] * WIDE, strict=True)


def story_of(endpoint: str, role: str, room: Room, steps: Steps | bytes) -> RoomStory:
    """As a value that can be shown and sent."""
    kept = unpack(steps) if isinstance(steps, bytes) else list(steps)
    if len(kept) > 2 * HALF:
        shorten(kept)
    tag: RoomTag = tag_of(kept)
    told = [_step(*step) for step in _each(kept) if step[1] is not None]
    return RoomStory(
        endpoint=endpoint,
        role=role,
        room=str(room),
        steps=tuple(sorted(told, key=lambda step: step.at)),
        request=tag.request,
        traceparent=tag.traceparent,
        left_out=sum(more for _, moment, _, more in _each(kept) if moment is None),
    )


def _step(at: float, moment: Moment, who: Peer | RoomTag | None, more: Any) -> StoryStep:
    """As a value: what stands behind the moment depends on it."""
    match who, more:
        case _, Span(first=first, end=end):
            return StoryStep(moment, at, detail=f"tokens {first} to {end}")
        case _, Failure(code=code, message=message):
            return StoryStep(moment, at, detail=f"{code}: {message}"[:1000])
        case Peer(), bool():
            return StoryStep(moment, at, str(who), more)
        case Peer(), (seconds, num_bytes, path):
            return StoryStep(moment, at, str(who), False, seconds, num_bytes, str(path))
        case _:
            return StoryStep(moment, at)
