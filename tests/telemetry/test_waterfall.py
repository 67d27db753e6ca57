"""A room's waterfall: one clock, stages that add up, words and drawings that say the same."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from telemetry.recorded import OFFSETS, failed, source, target

from kvferry.cli.trace.output import merged
from kvferry.dashboard.drawing import facts_of, waterfall_page, waterfall_svg
from kvferry.telemetry.steps import Moment, RoomTrace, TraceStep
from kvferry.telemetry.waterfall import RoomStage, Waterfall, join


def took(trace: Waterfall) -> dict[str, float]:
    return {stage: round(seconds, 6) for stage, seconds in trace.stages.items() if seconds}


def test_both_sides_stand_on_one_clock() -> None:
    trace = join([source(), target()], OFFSETS, {"d/0": 5e8})
    assert (trace.clock, trace.outcome, trace.seconds) == ("d/0", "done", 10.0)
    assert trace.begun_at == 5e8
    assert trace.request == "req-1"
    order = [(bar.endpoint, bar.step) for bar in trace.bars]
    assert order[:3] == [
        ("d/0", Moment.ASKED),
        ("p/0", Moment.OPENED),
        ("p/0", Moment.OFFERED),
    ]
    errors = {one.endpoint: one.error_s for one in trace.clocks}
    assert errors == {"d/0": 0.0, "p/0": 0.0004}


def test_stages_add_up_and_say_where_the_time_went() -> None:
    trace = join([source(), target()], OFFSETS)
    assert sum(trace.stages.values()) == pytest.approx(trace.seconds)
    assert took(trace) == {
        "prefill": 4.0,
        "control": 3.1,
        "gather": 0.5,
        "wire": 2.0,
        "scatter": 0.4,
    }
    assert trace.worst is RoomStage.PREFILL


def test_a_late_offer_is_a_wait_for_pages() -> None:
    assert took(join([source(late_offer=True), target()], OFFSETS))["pages"] == 2.0


def test_a_clock_that_nobody_measured_is_said_so() -> None:
    trace = join([source(), target()], {})
    errors = {one.endpoint: one.error_s for one in trace.clocks}
    assert errors == {"d/0": 0.0, "p/0": None}
    assert "not measured: p/0" in dict(facts_of(trace))["clocks"]


def test_a_failure_says_why() -> None:
    trace = join([failed()], {})
    assert (trace.outcome, trace.failure) == ("failed", "peer-gone: lost p/0")
    assert dict(facts_of(trace))["why"] == "peer-gone: lost p/0"


def test_drawings_are_whole_and_quote_what_others_say() -> None:
    bad = RoomTrace("<p>/0", "source", "<&>", (TraceStep(Moment.FAILED, 1.0, detail="<script>"),))
    for trace in (join([source(), target()], OFFSETS), join([bad], {})):
        drawn = waterfall_svg(trace)
        ElementTree.fromstring(drawn)
        assert "<script>" not in waterfall_page(trace)
    whole = join([source(), target()], OFFSETS)
    spans = (Moment.GATHERED, Moment.WRITTEN, Moment.SCATTERED)
    moments = [bar for bar in whole.bars if bar.step not in spans]
    assert waterfall_svg(whole).count("<circle") == len(moments)


def test_neighbours_of_one_kind_are_one_line() -> None:
    pushes = tuple(TraceStep(Moment.PUSHED, float(i)) for i in range(3))
    lines = merged(join([RoomTrace("p/0", "source", "1", pushes)], {}).bars)
    assert [times for _, times in lines] == [3]
