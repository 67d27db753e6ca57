"""Observers of one endpoint, as its configuration wants them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvferry.telemetry.metrics import EndpointMetrics, EndpointStats
from kvferry.telemetry.observer import Observer, together
from kvferry.telemetry.reports import EndpointView, ReportRequest
from kvferry.telemetry.spans import SpanExporter, Traced, find_tracer
from kvferry.telemetry.traces import TraceBuffer
from kvferry.telemetry.views import ViewedLoop, endpoint_view


class EndpointTelemetry:
    """Metrics, traces and spans of one endpoint, each if it is wanted.

    ``observer`` is all of them together, with one of the application's own if there is one.
    ``fixed`` has what never changes of the endpoint's view. ``trace_events`` of 0 turns traces
    and spans off.
    """

    def __init__(
        self,
        fixed: EndpointView,
        registry: CollectorRegistry | None,
        own: Observer | None,
        *,
        transport: str,
        metrics: bool,
        trace_events: int,
    ) -> None:
        self._fixed = fixed
        self.meter = EndpointMetrics(fixed.name, transport, registry) if metrics else None
        self.traces = TraceBuffer(fixed.name, fixed.role, trace_events) if trace_events else None
        tracer = find_tracer() if trace_events else None
        self._spans = SpanExporter(tracer, trace_events) if tracer else None
        self.observer = together(self.meter, self.traces, self._spans, own)
        self.stats = self.meter.stats if self.meter else EndpointStats()

    def start(self, traced: Traced) -> None:
        """Export spans, if somebody wants them."""
        if self._spans:
            self._spans.start(traced, f"kvferry-spans-{self._fixed.name}")

    def view(self, loop: ViewedLoop, wishes: ReportRequest) -> EndpointView:
        """How the endpoint is. On the loop thread."""
        return endpoint_view(self._fixed, loop, self.meter, self.traces, wishes)

    def close_spans(self) -> None:
        """Export what has ended, while the loop still answers."""
        if self._spans:
            self._spans.close()

    def close(self) -> None:
        """The loop has ended."""
        if self.meter:
            self.meter.close()
