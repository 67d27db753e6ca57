"""A room's waterfall: traces of all its endpoints on one clock, and where the time went. Pure.

Each instant of a room belongs to exactly one stage, so the stages add up to the room's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from kvferry.telemetry.clocks import Offset, aligned
from kvferry.telemetry.steps import RoomTrace, StepKind


class RoomStage(StrEnum):
    """Stage that an instant of a room belongs to."""

    PREFILL = "prefill"  # an engine still computes, or has not begun
    PAGES = "pages"  # computing is over, and a target has not offered its pages yet
    WIRE = "wire"  # a write is in flight
    GATHER = "gather"  # no write is in flight, and a copy into a staging slot runs
    SCATTER = "scatter"  # neither, and a copy out of a staging slot runs
    CONTROL = "control"  # the rest: messages, thread switches, waits for credits


# Where several overlap, the first of these gets the time.
SPANS = {
    StepKind.WRITTEN: RoomStage.WIRE,
    StepKind.GATHERED: RoomStage.GATHER,
    StepKind.SCATTERED: RoomStage.SCATTER,
}
ENDS = (StepKind.DONE, StepKind.FAILED)


class WaterfallBar(msgspec.Struct, frozen=True):
    """One line of a waterfall, from ``begun_s`` to ``ended_s`` after the room's first step."""

    endpoint: str
    role: str
    step: StepKind
    begun_s: float
    ended_s: float
    peer: str = ""
    num_bytes: int = msgspec.field(default=0, name="bytes")
    mode: str = ""
    detail: str = ""


class Waterfall(msgspec.Struct, frozen=True):
    """A room from its first step to its last. ``begun_at`` is the time of day, if known.

    ``seconds`` ends when the last target's engine was told the outcome (the source's, if no
    target reports), and ``stages`` add up to it. ``clock`` names the endpoint whose clock is used;
    ``clock_errors_s`` bounds the error of every endpoint's times, None for an unknown clock.
    """

    room: str
    outcome: str
    seconds: float
    stages: dict[RoomStage, float]
    bars: tuple[WaterfallBar, ...]
    clock: str
    clock_errors_s: dict[str, float | None]
    failure: str = ""
    request: str = ""
    traceparent: str = ""
    begun_at: float | None = None
    left_out: int = 0

    @property
    def span_s(self) -> float:
        """Seconds from the first step to the last, including steps after the outcome."""
        return max(bar.ended_s for bar in self.bars)


def build_waterfall(
    traces: Sequence[RoomTrace],
    offsets: Mapping[tuple[str, str], Offset] | None = None,
    days: Mapping[str, float] | None = None,
) -> Waterfall:
    """Return the waterfall of one room. At least one trace must have a step.

    ``days[endpoint]`` is the time of day when that endpoint's clock was at 0.
    """
    offsets = offsets or {}
    traces = [trace for trace in traces if trace.steps]
    names = sorted(trace.endpoint for trace in traces)
    targets = [trace.endpoint for trace in traces if trace.role == "target"]
    reference = min(targets or names)
    ahead = aligned(reference, offsets)
    # Clocks that nothing is known of count as equal.
    shifts = {name: ahead[name].seconds if name in ahead else 0.0 for name in names}
    begun = min(step.begun - shifts[trace.endpoint] for trace in traces for step in trace.steps)
    bars = [bar for trace in traces for bar in _bars(trace, begun + shifts[trace.endpoint])]
    bars.sort(key=lambda bar: (bar.begun_s, bar.ended_s))
    # The outcome is known when the last target's engine was told. What follows is cleaning up.
    ends = [bar for bar in bars if bar.step in ENDS]
    last = [bar for bar in ends if bar.role == "target"] or ends or bars
    ended_s = max(bar.ended_s for bar in last)
    failed = [bar for bar in bars if bar.step is StepKind.FAILED]
    day = (days or {}).get(reference)
    return Waterfall(
        room=traces[0].room,
        outcome="failed" if failed else "done" if ends else "open",
        # The first endpoint that failed knows the cause; the others were told.
        failure=min(failed, key=lambda bar: bar.ended_s).detail if failed else "",
        seconds=ended_s,
        stages=_stages(bars, ended_s),
        bars=tuple(bars),
        clock=reference,
        clock_errors_s={name: ahead[name].error_s if name in ahead else None for name in names},
        request=next((trace.request for trace in traces if trace.request), ""),
        traceparent=next((trace.traceparent for trace in traces if trace.traceparent), ""),
        begun_at=None if day is None else day + begun,
        left_out=sum(trace.left_out for trace in traces),
    )


def _bars(trace: RoomTrace, begun: float) -> list[WaterfallBar]:
    return [
        WaterfallBar(
            *(trace.endpoint, trace.role, step.step, step.begun - begun, step.at - begun),
            *(step.peer, step.num_bytes, step.mode, step.detail),
        )
        for step in trace.steps
    ]


def _stages(bars: Sequence[WaterfallBar], ended_s: float) -> dict[RoomStage, float]:
    """Return the seconds of each stage. All stages are present, and they add up."""
    computed = _all_sources_reached(bars, StepKind.FINISHED)
    offered = _all_sources_reached(bars, StepKind.OFFERED)
    spans = [(SPANS[bar.step], bar.begun_s, bar.ended_s) for bar in bars if bar.step in SPANS]
    borders = [computed, offered, *(at for _, *both in spans for at in both)]
    cuts = sorted({0.0, ended_s, *(at for at in borders if 0.0 < at < ended_s)})
    took = dict.fromkeys(RoomStage, 0.0)
    for first, last in pairwise(cuts):
        middle = (first + last) / 2
        active = {stage for stage, since, until in spans if since <= middle < until}
        if middle < computed:
            stage = RoomStage.PREFILL
        elif middle < offered:
            stage = RoomStage.PAGES
        else:
            stage = next((stage for stage in SPANS.values() if stage in active), RoomStage.CONTROL)
        took[stage] += last - first
    return took


def _all_sources_reached(bars: Iterable[WaterfallBar], step: StepKind) -> float:
    """Return when the last source had its first step of that kind."""
    firsts: dict[str, float] = {}
    for bar in bars:
        if bar.role == "source" and bar.step is step:
            firsts[bar.endpoint] = min(bar.ended_s, firsts.get(bar.endpoint, bar.ended_s))
    return max(firsts.values(), default=float("-inf"))
