"""Stories for tests: a room of one source and one target, on clocks of their own."""

from __future__ import annotations

from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.steps import Moment, RoomStory, StoryStep

AHEAD_S = 1000.0
OFFSETS = {("d/0", "p/0"): Offset(AHEAD_S, 0.0004)}


def source(*, late_offer: bool = False) -> RoomStory:
    offered = 6.0 if late_offer else 0.5
    steps = (
        StoryStep(Moment.OPENED, 0.2),
        StoryStep(Moment.OFFERED, offered, "d/0", True),
        StoryStep(Moment.PUSHED, 3.0, detail="tokens 0 to 64"),
        StoryStep(Moment.FINISHED, 4.0),
        StoryStep(Moment.GATHERED, 7.0, "d/0", False, 0.5, 1 << 20, "staged"),
        StoryStep(Moment.WRITTEN, 9.0, "d/0", False, 2.0, 1 << 20, "staged"),
        StoryStep(Moment.CLOSED, 9.1, "d/0"),
        StoryStep(Moment.DONE, 11.0),
    )
    moved = tuple(StoryStep(s.step, s.at + AHEAD_S, *_rest(s)) for s in steps)
    return RoomStory("p/0", "source", "17", moved, "req-1", "")


def _rest(step: StoryStep) -> tuple[str, bool, float, int, str, str]:
    return step.peer, step.heard, step.seconds, step.num_bytes, step.path, step.detail


def target() -> RoomStory:
    steps = (
        StoryStep(Moment.ASKED, 0.0),
        StoryStep(Moment.ARRIVED, 9.1, "p/0", True),
        StoryStep(Moment.SCATTERED, 9.6, "p/0", False, 0.4),
        StoryStep(Moment.CLOSED, 9.2, "p/0", True),
        StoryStep(Moment.DONE, 10.0),
    )
    return RoomStory("d/0", "target", "17", steps)


def failed() -> RoomStory:
    why = "peer-gone: lost p/0"
    steps = (StoryStep(Moment.ASKED, 0.0), StoryStep(Moment.FAILED, 2.0, detail=why))
    return RoomStory("d/0", "target", "17", steps)
