"""From the steps of a room, as the journal has them, to its story. Pure.

A step is five places: when, what, of which room, with whom, and what else belongs to it. At its
end a room says whose it was, when it began, when its engine had pushed everything, and why it
failed if it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory, StoryStep
from kvferry.runtime.telemetry.tags import RoomTag

# Steps one after another, each in its places.
Steps = list[Any]
Step = tuple[Any, ...]

WIDE = 5
HALF = MAX_STORY_STEPS // 2 * WIDE

ENDS = frozenset((Moment.DONE, Moment.FAILED))
OVER = ENDS | {Moment.RELEASED}


class Setting(NamedTuple):
    """What belongs to the whole of a room's story rather than to a step of it."""

    tag: RoomTag
    begun: float
    finished: float | None


class Teller(NamedTuple):
    """Whose stories they are."""

    endpoint: str
    role: str

    def story(self, room: Room, steps: Steps, setting: Setting) -> RoomStory:
        """As a value that can be shown and sent."""
        begins = Moment.OPENED if self.role == "source" else Moment.ASKED
        whole: Steps = [setting.begun, begins, room, None, None, *steps]
        if setting.finished is not None:
            # Among the last steps, of which none are left out.
            whole[-WIDE:-WIDE] = (setting.finished, Moment.FINISHED, room, None, None)
        if len(whole) > 2 * HALF:
            shorten(whole)
        told = [_step(*step) for step in each(whole) if step[1] is not None]
        return RoomStory(
            endpoint=self.endpoint,
            role=self.role,
            room=str(room),
            steps=tuple(sorted(told, key=lambda step: step.at)),
            request=setting.tag.request,
            traceparent=setting.tag.traceparent,
            left_out=sum(step[4] for step in each(whole) if step[1] is None),
        )


def each(steps: Iterable[Any]) -> Iterator[Step]:
    """One after another."""
    places = iter(steps)
    return zip(*[places] * WIDE, strict=True)


def last_end(steps: Steps) -> int | None:
    """Which step is the last that ends the room."""
    ends = (i for i, moment in enumerate(steps[1::WIDE]) if moment in ENDS)
    return max(ends, default=None)


def ended_attempt(steps: Steps, end: int) -> tuple[Steps, Setting]:
    """What has happened since the attempt before that end, for an id may be used again."""
    tag, (begun, finished, _) = steps[end * WIDE + 3 : end * WIDE + 5]
    return _after_last_over(steps, end), Setting(tag, begun, finished)


def present_attempt(steps: Steps) -> Steps:
    """What has happened since the room was last over."""
    return _after_last_over(steps, len(steps) // WIDE)


def _after_last_over(steps: Steps, before: int) -> Steps:
    over = (i + 1 for i, moment in enumerate(steps[1 : before * WIDE : WIDE]) if moment in OVER)
    return steps[max(over, default=0) * WIDE :]


def shorten(steps: Steps) -> None:
    """Leave the beginning and the end, and between them a place that says how many are missing."""
    middle = steps[HALF:-HALF]
    missing = sum(1 if step[1] is not None else step[4] for step in each(middle))
    steps[HALF:-HALF] = (middle[0], None, middle[2], None, missing)


def _step(at: float, moment: Moment, _: Room, who: Peer | RoomTag | None, more: Any) -> StoryStep:
    """As a value: what stands behind the moment depends on it."""
    match who, more:
        case _, Span(first=first, end=end):
            return StoryStep(moment, at, detail=f"tokens {first} to {end}")
        case RoomTag(), (_, _, str(why)):
            return StoryStep(moment, at, detail=why)
        case Peer(), bool():
            return StoryStep(moment, at, str(who), more)
        case Peer(), (seconds, num_bytes, path):
            return StoryStep(moment, at, str(who), False, seconds, num_bytes, str(path))
        case _:
            return StoryStep(moment, at)
