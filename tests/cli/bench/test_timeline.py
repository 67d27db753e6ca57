"""Timelines of ``kvferry bench transfer``."""

from __future__ import annotations

import pytest

from kvferry.cli.bench.timeline import TimelineStep, print_timeline, timeline_of
from kvferry.telemetry.steps import RoomTrace, StepKind, TraceStep


def test_steps_of_all_ranks_are_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    source = RoomTrace(
        "p/0",
        "source",
        "r",
        (
            TraceStep(StepKind.PUSHED, 10.001),
            TraceStep(StepKind.WRITTEN, 10.004, "d/0", 0.002, 1 << 20),
        ),
    )
    target = RoomTrace("d/0", "target", "r", (TraceStep(StepKind.ASKED, 9.5),))
    steps = timeline_of([source, None, target], began=10.0)
    assert steps == [
        TimelineStep(ms=-500.0, rank="d/0", step="asked"),
        TimelineStep(ms=1.0, rank="p/0", step="pushed"),
        TimelineStep(ms=4.0, rank="p/0", step="written", took_ms=2.0, peer="d/0", bytes=1 << 20),
    ]
    print_timeline(steps)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert words[0] == ["-500.000", "d/0", "asked"]
    assert words[2] == ["4.000", "p/0", "written", "d/0", "took", "2.000", "1.00", "MiB"]
