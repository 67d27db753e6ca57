"""A room's waterfall: one clock, stages that add up, words and drawings that say the same."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from telemetry.stories import OFFSETS, failed, source, target

from kvferry.cli.trace.output import merged
from kvferry.dashboard.drawing import facts_of, waterfall_page, waterfall_svg
from kvferry.telemetry.steps import Moment, RoomStory, StoryStep
from kvferry.telemetry.waterfall import RoomStage, Waterfall, join


def took(story: Waterfall) -> dict[str, float]:
    return {stage: round(seconds, 6) for stage, seconds in story.stages.items() if seconds}


def test_both_sides_stand_on_one_clock() -> None:
    story = join([source(), target()], OFFSETS, {"d/0": 5e8})
    assert (story.clock, story.outcome, story.seconds) == ("d/0", "done", 10.0)
    assert story.begun_at == 5e8
    assert story.request == "req-1"
    order = [(bar.endpoint, bar.step) for bar in story.bars]
    assert order[:3] == [
        ("d/0", Moment.ASKED),
        ("p/0", Moment.OPENED),
        ("p/0", Moment.OFFERED),
    ]
    errors = {one.endpoint: one.error_s for one in story.clocks}
    assert errors == {"d/0": 0.0, "p/0": 0.0004}


def test_stages_add_up_and_say_where_the_time_went() -> None:
    story = join([source(), target()], OFFSETS)
    assert sum(story.stages.values()) == pytest.approx(story.seconds)
    assert took(story) == {
        "prefill": 4.0,
        "control": 3.1,
        "gather": 0.5,
        "wire": 2.0,
        "scatter": 0.4,
    }
    assert story.worst is RoomStage.PREFILL


def test_a_late_offer_is_a_wait_for_pages() -> None:
    assert took(join([source(late_offer=True), target()], OFFSETS))["pages"] == 2.0


def test_a_clock_that_nobody_measured_is_said_so() -> None:
    story = join([source(), target()], {})
    errors = {one.endpoint: one.error_s for one in story.clocks}
    assert errors == {"d/0": 0.0, "p/0": None}
    assert "not measured: p/0" in dict(facts_of(story))["clocks"]


def test_a_failure_says_why() -> None:
    story = join([failed()], {})
    assert (story.outcome, story.failure) == ("failed", "peer-gone: lost p/0")
    assert dict(facts_of(story))["why"] == "peer-gone: lost p/0"


def test_drawings_are_whole_and_quote_what_others_say() -> None:
    bad = RoomStory("<p>/0", "source", "<&>", (StoryStep(Moment.FAILED, 1.0, detail="<script>"),))
    for story in (join([source(), target()], OFFSETS), join([bad], {})):
        drawn = waterfall_svg(story)
        ElementTree.fromstring(drawn)
        assert "<script>" not in waterfall_page(story)
    whole = join([source(), target()], OFFSETS)
    spans = (Moment.GATHERED, Moment.WRITTEN, Moment.SCATTERED)
    moments = [bar for bar in whole.bars if bar.step not in spans]
    assert waterfall_svg(whole).count("<circle") == len(moments)


def test_neighbours_of_one_kind_are_one_line() -> None:
    pushes = tuple(StoryStep(Moment.PUSHED, float(i)) for i in range(3))
    lines = merged(join([RoomStory("p/0", "source", "1", pushes)], {}).bars)
    assert [times for _, times in lines] == [3]
