"""Recorded traces for tests: a room of one source and one target with different clocks."""

from __future__ import annotations

from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.steps import RoomTrace, StepKind, TraceStep

AHEAD_S = 1000.0
OFFSETS = {("d/0", "p/0"): Offset(AHEAD_S, 0.0004)}


def source(*, late_offer: bool = False) -> RoomTrace:
    offered = 6.0 if late_offer else 0.5
    steps = (
        TraceStep(StepKind.OPENED, 0.2),
        TraceStep(StepKind.OFFERED, offered, "d/0"),
        TraceStep(StepKind.PUSHED, 3.0, detail="tokens 0 to 64"),
        TraceStep(StepKind.FINISHED, 4.0),
        TraceStep(StepKind.GATHERED, 7.0, "d/0", 0.5, 1 << 20, "staged"),
        TraceStep(StepKind.WRITTEN, 9.0, "d/0", 2.0, 1 << 20, "staged"),
        TraceStep(StepKind.CLOSED, 9.1, "d/0"),
        TraceStep(StepKind.DONE, 11.0),
    )
    moved = tuple(TraceStep(s.step, s.at + AHEAD_S, *_rest(s)) for s in steps)
    return RoomTrace("p/0", "source", "17", moved, "req-1", "")


def _rest(step: TraceStep) -> tuple[str, float, int, str, str]:
    return step.peer, step.seconds, step.num_bytes, step.mode, step.detail


def target() -> RoomTrace:
    steps = (
        TraceStep(StepKind.ASKED, 0.0),
        TraceStep(StepKind.ARRIVED, 9.1, "p/0"),
        TraceStep(StepKind.SCATTERED, 9.6, "p/0", 0.4),
        TraceStep(StepKind.CLOSED, 9.2, "p/0"),
        TraceStep(StepKind.DONE, 10.0),
    )
    return RoomTrace("d/0", "target", "17", steps)


def failed() -> RoomTrace:
    why = "peer-gone: lost p/0"
    steps = (TraceStep(StepKind.ASKED, 0.0), TraceStep(StepKind.FAILED, 2.0, detail=why))
    return RoomTrace("d/0", "target", "17", steps)
