"""Spans of a room for OpenTelemetry: one for the room at each endpoint, and its stages below it.

A span's parent is the ``traceparent`` under which the engine opened the room, so that both
sides stand in the trace of the client's request. Needs the extra ``otel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvferry.observe.steps import Moment, RoomStory
from kvferry.observe.waterfall import SPANS

TRACER = "kvferry"


class StageSpan(NamedTuple):
    """A part of a room's time at one endpoint, by its clock."""

    name: str
    begun: float
    ended: float
    attributes: dict[str, str | int]


def stages_here(story: RoomStory) -> Iterator[StageSpan]:
    """What one endpoint knows of where the time went."""
    first = {step.step: step.at for step in reversed(story.steps)}
    pairs = (
        ("prefill", Moment.OPENED, Moment.FINISHED),
        ("pages", Moment.FINISHED, Moment.OFFERED),
        ("offer", Moment.ASKED, Moment.ACCEPTED),
    )
    for name, begun, ended in pairs:
        if begun in first and ended in first and first[ended] > first[begun]:
            yield StageSpan(f"kvferry.{name}", first[begun], first[ended], {})
    for step in story.steps:
        if step.step in SPANS:
            about: dict[str, str | int] = {"kvferry.peer": step.peer}
            if step.num_bytes:
                about |= {"kvferry.bytes": step.num_bytes, "kvferry.path": step.path}
            yield StageSpan(f"kvferry.{SPANS[step.step]}", step.begun, step.at, about)


def emit(story: RoomStory, tracer: Any, day: float) -> None:
    """Give a room's spans to a tracer; ``day`` is the time of day when the clock was at 0."""
    from opentelemetry import trace  # noqa: PLC0415 - of the extra
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    def at(clock: float) -> int:
        return int((day + clock) * 1e9)

    carrier = {"traceparent": story.traceparent} if story.traceparent else {}
    parent = TraceContextTextMapPropagator().extract(carrier)
    about = {"kvferry.room": story.room, "kvferry.endpoint": story.endpoint}
    about |= {"kvferry.role": story.role}
    if story.request:
        about["kvferry.request"] = story.request
    begun = min(step.begun for step in story.steps)
    room = tracer.start_span("kvferry.room", parent, start_time=at(begun), attributes=about)
    below = trace.set_span_in_context(room)
    for stage in stages_here(story):
        span = tracer.start_span(
            stage.name, below, start_time=at(stage.begun), attributes=stage.attributes
        )
        span.end(at(stage.ended))
    failed = [step for step in story.steps if step.step is Moment.FAILED]
    if failed:
        room.set_status(trace.Status(trace.StatusCode.ERROR, failed[0].detail))
    room.end(at(max(step.at for step in story.steps)))
