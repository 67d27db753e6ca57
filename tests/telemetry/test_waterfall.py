"""Waterfalls: one clock for all endpoints, stages that add up, and drawings of them."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from telemetry.recorded import OFFSETS, failed, source, target

from kvferry.dashboard.drawing import facts_of, merged, waterfall_html
from kvferry.telemetry.steps import RoomTrace, StepKind, TraceStep
from kvferry.telemetry.waterfall import Waterfall, build_waterfall


def took(trace: Waterfall) -> dict[str, float]:
    return {stage: round(seconds, 6) for stage, seconds in trace.stages.items() if seconds}


def test_both_sides_share_one_clock() -> None:
    trace = build_waterfall([source(), target()], OFFSETS, {"d/0": 5e8})
    assert (trace.clock, trace.outcome, trace.seconds) == ("d/0", "done", 10.0)
    assert trace.begun_at == 5e8
    assert trace.request == "req-1"
    order = [(bar.endpoint, bar.step) for bar in trace.bars]
    assert order[:3] == [
        ("d/0", StepKind.ASKED),
        ("p/0", StepKind.OPENED),
        ("p/0", StepKind.OFFERED),
    ]
    assert trace.clock_errors_s == {"d/0": 0.0, "p/0": 0.0004}


def test_stages_add_up_to_the_rooms_time() -> None:
    trace = build_waterfall([source(), target()], OFFSETS)
    assert sum(trace.stages.values()) == pytest.approx(trace.seconds)
    assert took(trace) == {
        "prefill": 4.0,
        "control": 3.1,
        "gather": 0.5,
        "wire": 2.0,
        "scatter": 0.4,
    }
    assert dict(facts_of(trace))["stages"].startswith("prefill 4.00 s (40%), control 3.10 s (31%)")


def test_a_late_offer_counts_as_waiting_for_pages() -> None:
    assert took(build_waterfall([source(late_offer=True), target()], OFFSETS))["pages"] == 2.0


def test_an_unmeasured_clock_is_reported() -> None:
    trace = build_waterfall([source(), target()], {})
    assert trace.clock_errors_s == {"d/0": 0.0, "p/0": None}
    assert "not measured: p/0" in dict(facts_of(trace))["clocks"]


def test_a_failure_shows_its_reason() -> None:
    trace = build_waterfall([failed()], {})
    assert (trace.outcome, trace.failure) == ("failed", "peer-gone: lost p/0")
    assert dict(facts_of(trace))["reason"] == "peer-gone: lost p/0"


def test_drawings_are_valid_and_escape_foreign_text() -> None:
    bad = RoomTrace("<p>/0", "source", "<&>", (TraceStep(StepKind.FAILED, 1.0, detail="<script>"),))
    for trace in (build_waterfall([source(), target()], OFFSETS), build_waterfall([bad], {})):
        ElementTree.fromstring(waterfall_html(trace))
        assert "<script>" not in waterfall_html(trace)
    whole = build_waterfall([source(), target()], OFFSETS)
    assert waterfall_html(whole).count("<tr>") == len(whole.bars)


def test_neighbouring_steps_of_one_kind_merge() -> None:
    pushes = tuple(TraceStep(StepKind.PUSHED, float(i)) for i in range(3))
    lines = merged(build_waterfall([RoomTrace("p/0", "source", "1", pushes)], {}).bars)
    assert [times for _, times in lines] == [3]
