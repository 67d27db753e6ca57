"""OpenTelemetry spans: one per ended room and endpoint, with its stages as child spans.

Spans are exported only if the program has set up a tracer provider, or if OpenTelemetry's
environment variables name an exporter and the extra ``otel`` is installed. A thread asks the loop
once a second for the traces of rooms that ended meanwhile, so the loop itself creates no span.
The parent is the ``traceparent`` of the room, so both sides join the trace of the client's request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from kvferry.ids import Room
from kvferry.protocol.outcome import Outcome
from kvferry.telemetry.observer import ObservedRoom, Observer
from kvferry.telemetry.steps import RoomTrace, StepKind
from kvferry.telemetry.waterfall import SPANS, Waterfall, WaterfallBar, build_waterfall

EXPORT_EVERY_S = 1.0
VARIABLES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
# Waits that show as spans, from the first step of one kind to the first of another.
WAITS = (
    ("prefill", StepKind.OPENED, StepKind.FINISHED),
    ("pages", StepKind.FINISHED, StepKind.OFFERED),
    ("offer", StepKind.ASKED, StepKind.ACCEPTED),
)
# Returns the traces of rooms, made on the loop thread.
ReadTraces = Callable[[list[Room]], "Future[list[RoomTrace]]"]

log = logging.getLogger("kvferry.endpoint")


def spans_requested(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables ask for an exporter."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    values = (environment.get(name) for name in VARIABLES)
    return next(filter(None, values), "none") != "none"


def find_tracer(environment: Mapping[str, str] = os.environ) -> Any | None:
    """Return a tracer of the program's own provider, or one that the variables ask for, or None."""
    try:
        from opentelemetry import trace as otel  # noqa: PLC0415 - in the extra otel

        provider: Any = otel.get_tracer_provider()
        # Until the program sets a provider up, the API returns a placeholder without this method.
        if not hasattr(provider, "add_span_processor"):
            if not spans_requested(environment):
                return None
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider, export  # noqa: PLC0415

            provider = TracerProvider()
            exporter = trace_exporter.OTLPSpanExporter()
            provider.add_span_processor(export.BatchSpanProcessor(exporter))
    except ImportError:
        if spans_requested(environment):
            log.warning("spans-unavailable error=%r", "run pip install 'kvferry[otel]'")
        return None
    return provider.get_tracer("kvferry")


def child_spans(waterfall: Waterfall) -> Iterator[tuple[str, WaterfallBar]]:
    """Yield the waits, copies and writes of one endpoint's waterfall, with their names."""
    first = {bar.step: bar.ended_s for bar in reversed(waterfall.bars)}
    for name, since, until in WAITS:
        if since in first and first.get(until, 0.0) > first[since]:
            yield name, WaterfallBar("", "", until, first[since], first[until])
    for bar in waterfall.bars:
        if bar.step in SPANS:
            yield SPANS[bar.step], bar


def export_room(trace: RoomTrace, tracer: Any, day: float) -> None:
    """Export a room's spans; ``day`` is the time of day when the endpoint's clock was at 0."""
    from opentelemetry import trace as otel  # noqa: PLC0415 - in the extra otel
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    waterfall = build_waterfall([trace], days={trace.endpoint: day})

    def nanoseconds(seconds: float) -> int:
        return int(((waterfall.begun_at or 0.0) + seconds) * 1e9)

    def begin(name: str, parent: Any, at_s: float, **attributes: str | int) -> Any:
        named = {f"kvferry.{key}": value for key, value in attributes.items() if value}
        at = nanoseconds(at_s)
        return tracer.start_span(f"kvferry.{name}", parent, start_time=at, attributes=named)

    parent = TraceContextTextMapPropagator().extract({"traceparent": trace.traceparent})
    names = {"endpoint": trace.endpoint, "request": trace.request}
    room = begin("room", parent, 0.0, room=trace.room, role=trace.role, **names)
    below = otel.set_span_in_context(room)
    for name, bar in child_spans(waterfall):
        about = {"peer": bar.peer, "mode": bar.mode}
        span = begin(name, below, bar.begun_s, bytes=bar.num_bytes, **about)
        span.end(nanoseconds(bar.ended_s))
    if waterfall.failure:
        room.set_status(otel.Status(otel.StatusCode.ERROR, waterfall.failure))
    room.end(nanoseconds(waterfall.span_s))


class SpanExporter(Observer):
    """Exports the traces of ended rooms from ``start`` to ``close``, on a thread of its own."""

    def __init__(self, tracer: Any, max_rooms: int) -> None:
        self._tracer = tracer
        self._ended: deque[Room] = deque(maxlen=max_rooms)
        self._closing = threading.Event()

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Remember the room; the exporter's thread reads its trace later."""
        self._ended.append(room.room)

    def start(self, read_traces: ReadTraces, name: str, every_s: float = EXPORT_EVERY_S) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(read_traces, every_s), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Export what has ended so far, and stop the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self, read_traces: ReadTraces, every_s: float) -> None:
        closing, rooms = False, deque[Room](maxlen=self._ended.maxlen)
        while not closing:
            closing = self._closing.wait(every_s)
            while self._ended:
                rooms.append(self._ended.popleft())
            try:
                traces = read_traces(list(rooms)).result(every_s)
            except TimeoutError:
                # The loop is busy or has ended: try again with the next rooms.
                continue
            rooms.clear()
            day = time.time() - time.monotonic()
            for trace in traces:
                export_room(trace, self._tracer, day)
