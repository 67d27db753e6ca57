"""A room's waterfall: the traces of all its endpoints on one clock, and where its time went. Pure.

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
from kvferry.telemetry.steps import Moment, RoomTrace, TraceStep


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


class WaterfallBar(msgspec.Struct, frozen=True):
    """One line of a waterfall, from ``begun_s`` to ``ended_s`` after the room's beginning."""

    endpoint: str
    role: str
    step: Moment
    begun_s: float
    ended_s: float
    peer: str = ""
    heard: bool = False
    num_bytes: int = msgspec.field(default=0, name="bytes")
    mode: str = ""
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
    bars: tuple[WaterfallBar, ...]
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
    traces: Sequence[RoomTrace],
    offsets: Mapping[tuple[str, str], Offset],
    days: Mapping[str, float] | None = None,
) -> Waterfall:
    """All that is known of a room. There must be a trace, and a step in it.

    ``days[endpoint]`` is the time of day when that endpoint's clock was at 0.
    """
    told = [trace for trace in traces if trace.steps]
    names = [trace.endpoint for trace in told]
    targets = [trace.endpoint for trace in told if trace.role == "target"]
    reference = best_reference(targets or names, offsets)
    mapped = aligned(reference, offsets)
    on_one_clock = [_moved(trace, mapped.get(trace.endpoint)) for trace in told]
    begun = min(step.begun for trace in on_one_clock for step in trace.steps)
    bars = [_bar(trace, step, begun) for trace in on_one_clock for step in trace.steps]
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
        request=next((trace.request for trace in told if trace.request), ""),
        traceparent=next((trace.traceparent for trace in told if trace.traceparent), ""),
        begun_at=None if day is None else day + begun,
        left_out=sum(trace.left_out for trace in told),
    )


def _moved(trace: RoomTrace, ahead: Offset | None) -> RoomTrace:
    """A trace by the reference's clock; as it is where nothing is known."""
    by = ahead.seconds if ahead is not None else 0.0
    steps = tuple(msgspec.structs.replace(step, at=step.at - by) for step in trace.steps)
    return msgspec.structs.replace(trace, steps=steps)


def _bar(trace: RoomTrace, step: TraceStep, begun: float) -> WaterfallBar:
    return WaterfallBar(
        endpoint=trace.endpoint,
        role=trace.role,
        step=step.step,
        begun_s=step.begun - begun,
        ended_s=step.at - begun,
        peer=step.peer,
        heard=step.heard,
        num_bytes=step.num_bytes,
        mode=step.mode,
        detail=step.detail,
    )


def _error(endpoint: str, offset: Offset | None) -> ClockError:
    return ClockError(endpoint, None if offset is None else offset.error_s)


def _end_of(traces: Iterable[RoomTrace]) -> float:
    """When the last target's engine heard of the end; what is left after that is tidying up."""
    told = list(traces)
    ends = [at for trace in told if trace.role == "target" for at in trace.when(*END)]
    ends = ends or [at for trace in told for at in trace.when(*END)]
    return max(ends or [step.at for trace in told for step in trace.steps])


def _outcome(traces: Iterable[RoomTrace]) -> str:
    ends = {step.step for trace in traces for step in trace.steps if step.step in END}
    if Moment.FAILED in ends:
        return "failed"
    return "done" if ends else "open"


def _failure(traces: Iterable[RoomTrace]) -> str:
    """The first that failed knows why; the others were told."""
    failed = [step for trace in traces for step in trace.steps if step.step is Moment.FAILED]
    return min(failed, key=lambda step: step.at).detail if failed else ""


# ---------------------------------------------------------------- stages


def stages_of(traces: Sequence[RoomTrace], begun: float, ended: float) -> dict[RoomStage, float]:
    """How long each stage had between two moments. All are there, and they add up."""
    computed = _last_of(traces, "source", Moment.FINISHED)
    offered = _last_of(traces, "source", Moment.OFFERED)
    spans = [
        (SPANS[step.step], step.begun, step.at)
        for trace in traces
        for step in trace.steps
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


def _last_of(traces: Iterable[RoomTrace], role: str, step: Moment) -> float:
    """When all of a side had come so far: the last of their first times."""
    firsts = [min(found) for trace in traces if trace.role == role if (found := trace.when(step))]
    return max(firsts, default=float("-inf"))
