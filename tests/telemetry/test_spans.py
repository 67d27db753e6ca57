"""OpenTelemetry spans: a room and its stages within the client's trace."""

from __future__ import annotations

from typing import Any

import pytest
from endpoint.test_pair_in_process import AT_ONCE, WAIT_S, pair_by
from telemetry.recorded import failed, source, target

from kvferry.protocol.outcome import Done
from kvferry.telemetry.spans import SpanExporter, export_room, spans_requested
from kvferry.telemetry.steps import RoomTrace

sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")
export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector:
    """A tracer provider with an in-memory exporter."""

    def __init__(self) -> None:
        self.exporter = memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def traced(trace: RoomTrace) -> RoomTrace:
    return RoomTrace(trace.endpoint, trace.role, trace.room, trace.steps, "req-1", PARENT)


def test_a_room_and_its_stages_join_the_clients_trace() -> None:
    collector = Collector()
    export_room(traced(source()), collector.tracer, day=1e9)
    spans = collector.spans
    assert set(spans) == {"kvferry.room", "kvferry.prefill", "kvferry.gather", "kvferry.wire"}
    room = spans["kvferry.room"]
    assert f"{room.context.trace_id:032x}" == TRACE
    assert f"{room.parent.span_id:016x}" == "b7ad6b7169203331"
    assert {span.parent.span_id for name, span in spans.items() if span is not room} == {
        room.context.span_id
    }
    assert (room.attributes["kvferry.room"], room.attributes["kvferry.request"]) == ("17", "req-1")
    wire = spans["kvferry.wire"]
    assert (wire.end_time - wire.start_time) / 1e9 == pytest.approx(2.0)
    assert wire.attributes["kvferry.bytes"] == 1 << 20


def test_a_failed_room_is_an_error_span_with_its_reason() -> None:
    collector = Collector()
    export_room(failed(), collector.tracer, day=0.0)
    status = collector.spans["kvferry.room"].status
    assert (status.is_ok, status.description) == (False, "peer-gone: lost p/0")


def test_a_target_exports_its_scatters() -> None:
    collector = Collector()
    export_room(target(), collector.tracer, day=0.0)
    assert set(collector.spans) == {"kvferry.room", "kvferry.scatter"}


def test_an_endpoint_exports_ended_rooms() -> None:
    collector = Collector()
    spans = SpanExporter(collector.tracer, max_rooms=100)
    with pair_by(AT_ONCE, (spans, None)) as pair:
        spans.start(pair.source._traces_of, "kvferry-spans-test", every_s=WAIT_S)
        out = pair.source.open(7, request="req-7", traceparent=PARENT)
        into = pair.target.receive(7, prefill=pair.view, tokens=8, pages=[1, 2])
        out.push((0, 8), [3, 4])
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
        out.wait_released(WAIT_S)
        spans.close()
    room = collector.spans["kvferry.room"]
    assert room.attributes["kvferry.request"] == "req-7"
    assert f"{room.context.trace_id:032x}" == TRACE
    assert "kvferry.wire" in collector.spans


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_otel_variables_enable_spans(environment: dict[str, str], is_wanted: bool) -> None:
    assert spans_requested(environment) is is_wanted
