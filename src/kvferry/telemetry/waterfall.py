"""A room's waterfall: the stories of all its endpoints on one clock, and where its time went. Pure.

Every moment of a room is one stage's, so the stages add up to the room's time:

    prefill   an engine still computes, or has not begun
    pages     all is computed, and decode has not offered pages to everybody
    wire      something is being written
    gather    nothing is, and something is copied into a slot
    scatter   nor that, and something is copied out of one
    control   messages, threads and waits for credits are all that is left
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from kvferry.telemetry.clocks import Offset, aligned, best_reference
from kvferry.telemetry.steps import Moment, RoomStory, StoryStep


class RoomStage(StrEnum):
    """Where a moment of a room went."""

    PREFILL = "prefill"
    PAGES = "pages"
    WIRE = "wire"
    GATHER = "gather"
    SCATTER = "scatter"
    CONTROL = "control"


SPANS = {
    Moment.GATHERED: RoomStage.GATHER,
    Moment.WRITTEN: RoomStage.WIRE,
    Moment.SCATTERED: RoomStage.SCATTER,
}
# Where several go on at once, the first of these has the moment.
TURN = (RoomStage.WIRE, RoomStage.GATHER, RoomStage.SCATTER)
END = (Moment.DONE, Moment.FAILED)


class StoryBar(msgspec.Struct, frozen=True):
    """One line of a waterfall, from ``begun_s`` to ``ended_s`` after the room's beginning."""

    endpoint: str
    role: str
    step: Moment
    begun_s: float
    ended_s: float
    peer: str = ""
    heard: bool = False
    num_bytes: int = msgspec.field(default=0, name="bytes")
    path: str = ""
    detail: str = ""


class ClockError(msgspec.Struct, frozen=True):
    """How far off an endpoint's times may be; None where its clock could not be mapped."""

    endpoint: str
    error_s: float | None


class Waterfall(msgspec.Struct, frozen=True):
    """A room from its first step to its last. ``begun_at`` is the time of day, if it is known.

    ``seconds`` are those to its end for decode's engine (or prefill's, where decode says
    nothing), and ``stages`` add up to them. ``clock`` is the endpoint whose clock it is drawn by.
    """

    room: str
    outcome: str
    seconds: float
    stages: dict[RoomStage, float]
    bars: tuple[StoryBar, ...]
    clock: str
    clocks: tuple[ClockError, ...]
    failure: str = ""
    request: str = ""
    traceparent: str = ""
    begun_at: float | None = None
    left_out: int = 0

    @property
    def worst(self) -> RoomStage:
        """The stage that took most."""
        return max(self.stages, key=lambda stage: self.stages[stage])


def join(
    stories: Sequence[RoomStory],
    offsets: Mapping[tuple[str, str], Offset],
    days: Mapping[str, float] | None = None,
) -> Waterfall:
    """All that is known of a room. There must be a story, and a step in it.

    ``days[endpoint]`` is the time of day when that endpoint's clock was at 0.
    """
    told = [story for story in stories if story.steps]
    names = [story.endpoint for story in told]
    targets = [story.endpoint for story in told if story.role == "target"]
    reference = best_reference(targets or names, offsets)
    mapped = aligned(reference, offsets)
    on_one_clock = [_moved(story, mapped.get(story.endpoint)) for story in told]
    begun = min(step.begun for story in on_one_clock for step in story.steps)
    bars = [_bar(story, step, begun) for story in on_one_clock for step in story.steps]
    ended = _end_of(on_one_clock)
    day = (days or {}).get(reference)
    return Waterfall(
        room=told[0].room,
        outcome=_outcome(told),
        failure=_failure(told),
        seconds=ended - begun,
        stages=stages_of(on_one_clock, begun, ended),
        bars=tuple(sorted(bars, key=lambda bar: (bar.begun_s, bar.ended_s))),
        clock=reference,
        clocks=tuple(_error(name, mapped.get(name)) for name in sorted(names)),
        request=next((story.request for story in told if story.request), ""),
        traceparent=next((story.traceparent for story in told if story.traceparent), ""),
        begun_at=None if day is None else day + begun,
        left_out=sum(story.left_out for story in told),
    )


def _moved(story: RoomStory, ahead: Offset | None) -> RoomStory:
    """A story by the reference's clock; as it is where nothing is known."""
    by = ahead.seconds if ahead is not None else 0.0
    steps = tuple(msgspec.structs.replace(step, at=step.at - by) for step in story.steps)
    return msgspec.structs.replace(story, steps=steps)


def _bar(story: RoomStory, step: StoryStep, begun: float) -> StoryBar:
    return StoryBar(
        endpoint=story.endpoint,
        role=story.role,
        step=step.step,
        begun_s=step.begun - begun,
        ended_s=step.at - begun,
        peer=step.peer,
        heard=step.heard,
        num_bytes=step.num_bytes,
        path=step.path,
        detail=step.detail,
    )


def _error(endpoint: str, offset: Offset | None) -> ClockError:
    return ClockError(endpoint, None if offset is None else offset.error_s)


def _end_of(stories: Iterable[RoomStory]) -> float:
    """When the last target's engine heard of the end; what is left after that is tidying up."""
    told = list(stories)
    ends = [at for story in told if story.role == "target" for at in story.when(*END)]
    ends = ends or [at for story in told for at in story.when(*END)]
    return max(ends or [step.at for story in told for step in story.steps])


def _outcome(stories: Iterable[RoomStory]) -> str:
    ends = {step.step for story in stories for step in story.steps if step.step in END}
    if Moment.FAILED in ends:
        return "failed"
    return "done" if ends else "open"


def _failure(stories: Iterable[RoomStory]) -> str:
    """The first that failed knows why; the others were told."""
    failed = [step for story in stories for step in story.steps if step.step is Moment.FAILED]
    return min(failed, key=lambda step: step.at).detail if failed else ""


# ---------------------------------------------------------------- stages


def stages_of(stories: Sequence[RoomStory], begun: float, ended: float) -> dict[RoomStage, float]:
    """How long each stage had between two moments. All are there, and they add up."""
    computed = _last_of(stories, "source", Moment.FINISHED)
    offered = _last_of(stories, "source", Moment.OFFERED)
    spans = [
        (SPANS[step.step], step.begun, step.at)
        for story in stories
        for step in story.steps
        if step.step in SPANS
    ]
    borders = [computed, offered, *(at for _, *both in spans for at in both)]
    cuts = sorted({begun, ended, *(at for at in borders if begun < at < ended)})
    took = dict.fromkeys(RoomStage, 0.0)
    for first, last in pairwise(cuts):
        middle = (first + last) / 2
        going = {stage for stage, since, until in spans if since <= middle < until}
        took[_stage(middle, computed, offered, going)] += last - first
    return took


def _stage(at: float, computed: float, offered: float, going: set[RoomStage]) -> RoomStage:
    if at < computed:
        return RoomStage.PREFILL
    if at < offered:
        return RoomStage.PAGES
    return next((stage for stage in TURN if stage in going), RoomStage.CONTROL)


def _last_of(stories: Iterable[RoomStory], role: str, step: Moment) -> float:
    """When all of a side had come so far: the last of their first times."""
    firsts = [min(found) for story in stories if story.role == role if (found := story.when(step))]
    return max(firsts, default=float("-inf"))
