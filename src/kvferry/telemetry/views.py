"""The view of an endpoint, made on its loop thread, where nothing changes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvferry.ids import Peer
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Status
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.metrics import EndpointMetrics, EndpointStats
from kvferry.telemetry.observer import ObservedRoom
from kvferry.telemetry.reports import (
    MAX_FAILURES_SHOWN,
    MAX_LINKS,
    MAX_ROOMS_SHOWN,
    MAX_SLOW_SHOWN,
    MAX_TRACES,
    EndpointView,
    FailureView,
    LinkView,
    ModeBytes,
    ReportRequest,
    RoomView,
)
from kvferry.telemetry.traces import TraceBuffer


class ViewedRoom(ObservedRoom, Protocol):
    """Fields of an open room's handle that a view shows."""

    status: Status

    @property
    def num_pages(self) -> int:
        """Pages that are held for it."""


class ViewedLoop(NamedTuple):
    """Fields of a loop that a view shows: rooms, links, and clocks of peers."""

    rooms: Collection[ViewedRoom]
    num_quarantined: int
    links: Iterable[Link]
    offset: Callable[[Peer, float], Offset | None]


def endpoint_view(
    fixed: EndpointView,
    loop: ViewedLoop,
    meter: EndpointMetrics | None,
    traces: TraceBuffer | None,
    wishes: ReportRequest,
) -> EndpointView:
    """How an endpoint is; ``fixed`` has what never changes."""
    now = time.monotonic()
    stats = meter.stats if meter else EndpointStats()
    sent = meter.sent if meter else {}

    def link_view(link: Link) -> LinkView:
        modes = sent.get(link.peer, {}).items()
        return LinkView(
            peer=str(link.peer),
            state=str(link.state),
            transport=stats.links.get(str(link.peer), ""),
            silent_s=max(0.0, now - link.heard_at),
            sent=tuple(ModeBytes(str(mode), num_bytes) for mode, num_bytes in modes if num_bytes),
            offset=loop.offset(link.peer, now),
        )

    view = replace(
        fixed,
        clock=now,
        wall=time.time(),
        num_open=len(loop.rooms),
        num_quarantined=loop.num_quarantined,
        num_done=stats.rooms["done"],
        num_failed=sum(stats.rooms.values()) - stats.rooms["done"],
        staging_used_bytes=stats.staging_used_bytes,
        pages_held=sum(room.num_pages for room in loop.rooms),
        troubles=_troubles(stats),
        links=tuple(link_view(link) for link in islice(loop.links, MAX_LINKS)),
        rooms=_open_rooms(loop.rooms, now),
        layout=fixed.layout if wishes.layout else None,
    )
    return _with_traces(view, traces, wishes) if traces else view


def _troubles(stats: EndpointStats) -> tuple[str, ...]:
    broken = [f"the {thread} thread has ended by a bug; restart it" for thread in stats.broken]
    late = [
        f"the {thread} thread shows no life for {seconds:.0f} s"
        for thread, seconds in stats.stalled.items()
        if seconds
    ]
    return (*broken, *late)


def _open_rooms(rooms: Collection[ViewedRoom], now: float) -> tuple[RoomView, ...]:
    """Those that have been open for longest."""
    oldest = sorted(rooms, key=lambda room: room.begun)[:MAX_ROOMS_SHOWN]
    return tuple(
        RoomView(
            room=str(room.room),
            status=room.status.name.lower(),
            begun=room.begun,
            seconds=now - room.begun,
            request=room.tag.request,
        )
        for room in oldest
    )


def _with_traces(view: EndpointView, traces: TraceBuffer, wishes: ReportRequest) -> EndpointView:
    """With what is known of ended rooms."""
    slow = tuple(
        RoomView(
            room=str(one.room),
            status="ended",
            begun=one.begun,
            seconds=one.seconds,
            request=one.tag.request,
        )
        for one in traces.slow.slowest(view.clock, MAX_SLOW_SHOWN)
    )
    failures = tuple(
        FailureView(
            room=str(one.room),
            at=one.at,
            code=str(one.failure.code),
            reason=one.failure.message[:1000],
            request=one.tag.request,
        )
        for one, _ in list(traces.failures)[-MAX_FAILURES_SHOWN:]
        if one.failure
    )
    named = tuple(traces.named(wishes.rooms[:MAX_TRACES]))
    return replace(view, slow=slow, failures=failures, traces=named)
