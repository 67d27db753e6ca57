"""Observers of one endpoint as its configuration asks for them, and its status report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.ids import Peer
from kvferry.plan.choose import TransferMode
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Failure
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.metrics import EndpointMetrics, EndpointStats
from kvferry.telemetry.observer import ObservedRoom, Observer, Observers
from kvferry.telemetry.spans import ReadTraces, SpanExporter, find_tracer
from kvferry.telemetry.status import (
    MAX_LINKS,
    MAX_ROOMS_SHOWN,
    MAX_SLOW_SHOWN,
    MAX_TRACES,
    EndpointStatus,
    FailureStatus,
    LinkStatus,
    RankState,
    ReportRequest,
    RoomStatus,
)
from kvferry.telemetry.traces import RoomRecord, TraceBuffer

# Reports that follow each other faster than this share one measurement of the rates.
MIN_RATE_WINDOW_S = 0.5


class RateMeter:
    """Rates of an endpoint: bytes per second to each peer, and rooms ended per second."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._sent: dict[Peer, int] = {}
        self._num_ended = 0
        self.bytes_per_s: dict[Peer, float] = {}
        self.rooms_per_s = 0.0

    def update(self, sent: Mapping[Peer, Mapping[TransferMode, int]], num: int, now: float) -> None:
        """Measure again, unless the last measurement is too recent. ``num`` rooms have ended."""
        elapsed_s = now - self._at
        if elapsed_s < MIN_RATE_WINDOW_S:
            return
        totals = {peer: sum(by_mode.values()) for peer, by_mode in sent.items()}
        self.bytes_per_s = {
            peer: max(0, total - self._sent.get(peer, 0)) / elapsed_s
            for peer, total in totals.items()
        }
        self.rooms_per_s = (num - self._num_ended) / elapsed_s
        self._at, self._sent, self._num_ended = now, totals, num


class EndpointTelemetry:
    """Metrics, traces and spans of one endpoint, each if it is enabled.

    ``observer`` combines them with the application's own. ``fixed`` holds the fields of the
    status that never change. ``trace_events`` of 0 turns traces and spans off.
    """

    def __init__(
        self,
        fixed: EndpointStatus,
        registry: CollectorRegistry | None,
        own: Observer | None,
        *,
        transport: str,
        metrics: bool,
        trace_events: int,
    ) -> None:
        self._fixed = fixed
        self.meter = (
            EndpointMetrics(fixed.name, transport, fixed.role, registry) if metrics else None
        )
        # Without observing anything, the buffer stays empty.
        self.traces = TraceBuffer(fixed.name, fixed.role, trace_events)
        tracer = find_tracer() if trace_events else None
        self._spans = SpanExporter(tracer, trace_events) if tracer else None
        traces = self.traces if trace_events else None
        self.observer = Observers(self.meter, traces, self._spans, own)
        self.stats = self.meter.stats if self.meter else EndpointStats()
        self._sent = self.meter.sent if self.meter else {}
        self._rates = RateMeter()

    def start(self, read_traces: ReadTraces) -> None:
        """Start exporting spans, if a tracer is configured."""
        if self._spans:
            self._spans.start(read_traces, f"kvferry-spans-{self._fixed.name}")

    def close_spans(self) -> None:
        """Export the spans of ended rooms. Call while the loop still runs."""
        if self._spans:
            self._spans.close()

    def close(self) -> None:
        """Remove the endpoint's gauges. Call after the loop has ended."""
        if self.meter:
            self.meter.close()

    def view(
        self,
        rooms: Collection[ObservedRoom],
        num_quarantined: int,
        links: Iterable[Link],
        clock_offset: Callable[[Peer, float], Offset | None],
        request: ReportRequest,
    ) -> EndpointStatus:
        """Return the endpoint's status. Call on the loop thread."""
        now, stats, fixed = time.monotonic(), self.stats, self._fixed
        self._rates.update(self._sent, stats.rooms.total(), now)
        traces, troubles = self.traces, _troubles(stats)
        longest = sorted(rooms, key=lambda room: room.begun)[:MAX_ROOMS_SHOWN]
        return replace(
            fixed,
            clock=now,
            wall=time.time(),
            state=RankState.TROUBLED if troubles else RankState.UP,
            note="; ".join(troubles)[:1024],
            num_open=len(rooms),
            num_quarantined=num_quarantined,
            num_done=stats.rooms["done"],
            num_failed=stats.rooms.total() - stats.rooms["done"],
            staging_used_bytes=stats.staging_used_bytes,
            pages_held=sum(room.num_pages for room in rooms),
            tokens_held=sum(room.held_tokens for room in rooms),
            quarantined_bytes=stats.quarantined_bytes,
            bytes_per_s=sum(self._rates.bytes_per_s.values()),
            rooms_per_s=self._rates.rooms_per_s,
            links=tuple(
                self._link(one, clock_offset(one.peer, now)) for one in islice(links, MAX_LINKS)
            ),
            rooms=tuple(
                self._room(one, one.status.name.lower(), now - one.begun) for one in longest
            ),
            slow=tuple(
                self._room(one, "ended", one.seconds) for one in traces.slowest(now, MAX_SLOW_SHOWN)
            ),
            failures=tuple(
                self._failure(one, one.failure, now) for one in traces.failed if one.failure
            ),
            traces=tuple(traces.named(request.rooms)[:MAX_TRACES]),
        )

    def _link(self, link: Link, offset: Offset | None) -> LinkStatus:
        me, peer, sent = self._fixed.name, str(link.peer), self._sent.get(link.peer, {})
        source, target = (me, peer) if self._fixed.role == "source" else (peer, me)
        return LinkStatus(
            source=source,
            target=target,
            state=str(link.state),
            transport=self.stats.links.get(peer, ""),
            mode=str(max(sent, key=sent.__getitem__)) if any(sent.values()) else "",
            bytes_per_s=self._rates.bytes_per_s.get(link.peer, 0.0),
            num_bytes=sum(sent.values()),
            offset=offset,
        )

    def _room(self, room: ObservedRoom | RoomRecord, status: str, seconds: float) -> RoomStatus:
        return RoomStatus(
            room=str(room.room),
            status=status,
            seconds=seconds,
            endpoints=(self._fixed.name,),
            request=room.tag.request,
        )

    def _failure(self, room: RoomRecord, failure: Failure, now: float) -> FailureStatus:
        return FailureStatus(
            room=str(room.room),
            endpoint=self._fixed.name,
            ago_s=now - room.at,
            code=str(failure.code),
            reason=failure.message[:1000],
            request=room.tag.request,
        )


def _troubles(stats: EndpointStats) -> list[str]:
    stalled = {thread: seconds for thread, seconds in stats.stalled.items() if seconds}
    return [
        *(f"a bug ended the {thread} thread; restart this rank" for thread in stats.broken),
        *(f"the {one} thread made no progress for {stalled[one]:.0f} s" for one in stalled),
    ]
