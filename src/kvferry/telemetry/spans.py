"""OpenTelemetry spans: one for each ended room at each endpoint, and its stages below it.

They are made only where somebody wants them: the program has set up a tracer provider, or
OpenTelemetry's own environment variables name an exporter and the extra ``otel`` is there. A
thread asks the loop once a second for the traces of the rooms that have ended since, so the loop
makes no span. A span's parent is the ``traceparent`` under which the engine opened the room, so
that both sides are part of the trace of the client's request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from kvferry.ids import Room
from kvferry.protocol.outcome import Outcome
from kvferry.telemetry.observer import ObservedRoom, Observer
from kvferry.telemetry.steps import Moment, RoomTrace
from kvferry.telemetry.waterfall import SPANS

TRACER = "kvferry"
log = logging.getLogger("kvferry.endpoint")

EVERY_S = 1.0
VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
# The traces of those rooms, made on the loop thread.
Traced = Callable[[list[Room]], "Future[list[RoomTrace]]"]


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    named = [environment.get(name, "") for name in VARIABLES]
    return any(named) and environment.get("OTEL_TRACES_EXPORTER") != "none"


def find_tracer(environment: Mapping[str, str] = os.environ) -> Any | None:
    """Where spans go: to the program's own provider, or where the variables say; else nowhere."""
    try:
        from opentelemetry import trace as otel  # noqa: PLC0415 - of the extra
    except ImportError:
        if wanted(environment):
            log.warning("no-spans problem=%r", "run pip install 'kvferry[otel]'")
        return None
    # Before the program sets a provider up, the API has a placeholder.
    provider = otel.get_tracer_provider()
    if hasattr(provider, "add_span_processor"):
        return provider.get_tracer(TRACER)
    return _by_environment() if wanted(environment) else None


def _by_environment() -> Any | None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        log.warning("no-spans problem=%r", "run pip install 'kvferry[otel]'")
        return None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer(TRACER)


class StageSpan(NamedTuple):
    """A part of a room's time at one endpoint, by its clock."""

    name: str
    begun: float
    ended: float
    attributes: dict[str, str | int]


def stages_here(trace: RoomTrace) -> Iterator[StageSpan]:
    """Spans of one endpoint."""
    first = {step.step: step.at for step in reversed(trace.steps)}
    pairs = (
        ("prefill", Moment.OPENED, Moment.FINISHED),
        ("pages", Moment.FINISHED, Moment.OFFERED),
        ("offer", Moment.ASKED, Moment.ACCEPTED),
    )
    for name, begun, ended in pairs:
        if begun in first and ended in first and first[ended] > first[begun]:
            yield StageSpan(f"kvferry.{name}", first[begun], first[ended], {})
    for step in trace.steps:
        if step.step in SPANS:
            about: dict[str, str | int] = {"kvferry.peer": step.peer}
            if step.num_bytes:
                about |= {"kvferry.bytes": step.num_bytes, "kvferry.mode": step.mode}
            yield StageSpan(f"kvferry.{SPANS[step.step]}", step.begun, step.at, about)


def emit(trace: RoomTrace, tracer: Any, day: float) -> None:
    """Give a room's spans to a tracer; ``day`` is the time of day when the clock was at 0."""
    from opentelemetry import trace as otel  # noqa: PLC0415 - of the extra
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    def at(clock: float) -> int:
        return int((day + clock) * 1e9)

    carrier = {"traceparent": trace.traceparent} if trace.traceparent else {}
    parent = TraceContextTextMapPropagator().extract(carrier)
    about = {"kvferry.room": trace.room, "kvferry.endpoint": trace.endpoint}
    about |= {"kvferry.role": trace.role}
    if trace.request:
        about["kvferry.request"] = trace.request
    begun = min(step.begun for step in trace.steps)
    room = tracer.start_span("kvferry.room", parent, start_time=at(begun), attributes=about)
    below = otel.set_span_in_context(room)
    for stage in stages_here(trace):
        span = tracer.start_span(
            stage.name, below, start_time=at(stage.begun), attributes=stage.attributes
        )
        span.end(at(stage.ended))
    failed = [step for step in trace.steps if step.step is Moment.FAILED]
    if failed:
        room.set_status(otel.Status(otel.StatusCode.ERROR, failed[0].detail))
    room.end(at(max(step.at for step in trace.steps)))


class SpanExporter(Observer):
    """Gives the traces of ended rooms to a tracer, from ``start`` to ``close``."""

    def __init__(self, tracer: Any, most_rooms: int) -> None:
        self._tracer = tracer
        self._ended: deque[Room] = deque(maxlen=most_rooms)
        self._closing = threading.Event()

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Its trace is asked for later, on another thread."""
        self._ended.append(room.room)

    def start(self, traced: Traced, name: str, every_s: float = EVERY_S) -> None:
        """Begin to ask for traces every so many seconds."""
        self._thread = threading.Thread(
            target=self._run, args=(traced, every_s), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Export what has ended by now, and end the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self, traced: Traced, every_s: float) -> None:
        closing, rooms = False, deque[Room](maxlen=self._ended.maxlen)
        while not closing:
            closing = self._closing.wait(every_s)
            while self._ended:
                rooms.append(self._ended.popleft())
            try:
                traces = traced(list(rooms)).result(every_s)
            except TimeoutError:
                # The loop has other things to do, or has ended.
                continue
            rooms.clear()
            day = time.time() - time.monotonic()
            for trace in traces:
                emit(trace, self._tracer, day)
