"""Merges the reports of all endpoints into one status of the cluster. Pure: time is passed in.

The discovery service owns one ``ClusterMonitor``. Each report is answered with a
``ReportRequest``: when the next one is due, and which traces it should hold. Reports come more
often while somebody watches. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from kvferry.layout.layout import Layout
from kvferry.telemetry.status import (
    ALIVE,
    MAX_TRACES,
    ClusterStatus,
    EndpointStatus,
    FailureStatus,
    InstanceStatus,
    LinkStatus,
    RankState,
    RankStatus,
    ReportRequest,
    RoomStatus,
)
from kvferry.telemetry.steps import RoomTrace
from kvferry.telemetry.waterfall import Waterfall, build_waterfall

MAX_ENDPOINTS = 16384
# Seconds between reports while somebody watches, and otherwise.
WATCHED_S, UNWATCHED_S = 1.0, 3.0
# Limit for the whole cluster, whatever its size.
MAX_REPORTS_PER_S = 200.0
# Seconds that one query counts as watching.
WATCHING_S = 10.0
# Missed reports until an endpoint is silent, and seconds until it is gone.
MAX_MISSED, GONE_S = 3.0, 30.0
# How long an endpoint that is gone is still shown.
FORGET_S = 600.0
QUERY_TTL_S = 60.0
MAX_QUERIES = 64
# Queries for one room within this time share their answers.
TRACE_FRESH_S = 2.0
MAX_ROOMS, MAX_SLOW, MAX_FAILURES = 100, 10, 20


@dataclass(slots=True)
class _Endpoint:
    """An endpoint's last report, when it came, and when the next one is due."""

    report: EndpointStatus
    reported_at: float
    every_s: float

    def state(self, now: float) -> RankState:
        silent_s = now - self.reported_at
        if silent_s > GONE_S:
            return RankState.GONE
        is_silent = silent_s > MAX_MISSED * self.every_s + 1.0
        return RankState.SILENT if is_silent else self.report.state

    def is_alive(self, now: float) -> bool:
        return self.state(now) in ALIVE


@dataclass(slots=True)
class _TraceQuery:
    """A room whose traces are collected: which endpoints were asked, and which have answered."""

    at: float
    asked: set[str] = field(default_factory=set)
    answers: dict[str, RoomTrace | None] = field(default_factory=dict)


class ClusterMonitor:
    """Last reports of all endpoints, and open queries for traces."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._queries: dict[str, _TraceQuery] = {}
        self._watched_at = -inf

    # ------------------------------------------------------------ reports

    def take(self, report: EndpointStatus, now: float) -> ReportRequest:
        """Store a report; return what the endpoint should report next."""
        name = report.name
        usual_s = WATCHED_S if now - self._watched_at < WATCHING_S else UNWATCHED_S
        every_s = max(usual_s, len(self._endpoints) / MAX_REPORTS_PER_S)
        if name in self._endpoints or len(self._endpoints) < MAX_ENDPOINTS:
            self._endpoints[name] = _Endpoint(report, now, every_s)
        traces = {trace.room: trace for trace in report.traces}
        # A report answers the previous request.
        unasked: list[str] = []
        for room, query in self._queries.items():
            if name in query.asked:
                query.answers.setdefault(name, traces.get(room))
            elif len(unasked) < MAX_TRACES:
                query.asked.add(name)
                unasked.append(room)
        return ReportRequest(every_s=every_s, rooms=tuple(unasked))

    def leave(self, name: str, incarnation: int) -> bool:
        """Remove an endpoint that closes; return whether this incarnation was known."""
        known = self._endpoints.get(name)
        if known is None or known.report.incarnation != incarnation:
            return False
        del self._endpoints[name]
        return True

    def forget(self, now: float) -> None:
        """Drop endpoints that are long gone, and old queries."""
        for name, known in list(self._endpoints.items()):
            if now - known.reported_at > FORGET_S:
                del self._endpoints[name]
        for room, query in list(self._queries.items()):
            if now - query.at > QUERY_TTL_S:
                del self._queries[room]

    # ------------------------------------------------------------ traces

    def query_trace(self, room: str, now: float) -> None:
        """Ask every endpoint for a room's trace, unless that was done a moment ago."""
        self._watched_at = now
        known = self._queries.get(room)
        if known is not None and now - known.at < TRACE_FRESH_S:
            return
        self._queries.pop(room, None)
        while len(self._queries) >= MAX_QUERIES:
            del self._queries[next(iter(self._queries))]
        self._queries[room] = _TraceQuery(now)

    def is_answered(self, room: str, now: float) -> bool:
        """Return whether every endpoint that is alive has answered the query."""
        query = self._queries.get(room)
        alive = {name for name, known in self._endpoints.items() if known.is_alive(now)}
        return query is None or alive <= query.answers.keys()

    def waterfall(self, room: str) -> Waterfall | None:
        """Return a queried room's waterfall from the answers so far; None if nobody knows it."""
        query = self._queries.get(room)
        traces = [trace for trace in query.answers.values() if trace] if query else []
        if not traces:
            return None
        reports = [known.report for known in self._endpoints.values()]
        days = {report.name: report.wall - report.clock for report in reports}
        offsets = {
            (report.name, link.target if link.source == report.name else link.source): link.offset
            for report in reports
            for link in report.links
            if link.offset is not None
        }
        return build_waterfall(traces, offsets, days)

    # ------------------------------------------------------------ status

    def layout_of(self, instance: str) -> Layout | None:
        """Return an instance's layout, if any of its ranks has reported it."""
        reports = (known.report for known in self._endpoints.values())
        return next((one.layout for one in reports if one.instance == instance), None)

    def status(self, now: float, wall: float, served_by: str) -> ClusterStatus:
        """Return the cluster's status, and ask for reports more often for a while."""
        self._watched_at = now
        endpoints = list(self._endpoints.values())
        shown = [one for one in endpoints if one.state(now) is not RankState.GONE]
        # Targets last: the last report gives a room's status, and a target knows what has arrived.
        shown.sort(key=lambda one: one.report.role == "target")
        rooms = _merge_rooms(
            (room, now - one.reported_at) for one in shown for room in one.report.rooms
        )
        slow = _merge_rooms((room, 0.0) for one in shown for room in one.report.slow)
        links = _links(endpoints, now)
        # Every rank of a target ends every room, so rank 0 counts them.
        counting = (
            one.report
            for one in endpoints
            if one.is_alive(now) and one.report.role == "target" and one.report.rank == 0
        )
        return ClusterStatus(
            at=wall,
            served_by=served_by,
            instances=_instances(endpoints, now),
            links=links,
            rooms=rooms[:MAX_ROOMS],
            slow=slow[:MAX_SLOW],
            failures=_failures(endpoints, now)[:MAX_FAILURES],
            num_open=len(rooms),
            bytes_per_s=sum(link.bytes_per_s for link in links),
            rooms_per_s=sum(report.rooms_per_s for report in counting),
        )


def _instances(endpoints: Iterable[_Endpoint], now: float) -> tuple[InstanceStatus, ...]:
    by_name: dict[str, dict[int, _Endpoint]] = {}
    for one in endpoints:
        by_name.setdefault(one.report.instance, {})[one.report.rank] = one
    merged = [_instance(reported, now) for reported in by_name.values()]
    return tuple(sorted(merged, key=lambda one: (one.role, one.name)))


def _instance(reported: Mapping[int, _Endpoint], now: float) -> InstanceStatus:
    newest = max(reported.values(), key=lambda one: one.reported_at).report
    ranks = [_rank(rank, reported.get(rank), now) for rank in range(newest.layout.num_ranks)]
    down = [str(one.rank) for one in ranks if one.state not in ALIVE]
    return InstanceStatus(
        name=newest.instance,
        role=newest.role,
        sharding=str(newest.layout),
        transport=newest.transport,
        note=f"no report from rank {', '.join(down[:8])}" if down else "",
        ranks=tuple(ranks),
    )


def _rank(rank: int, known: _Endpoint | None, now: float) -> RankStatus:
    if known is None:
        return RankStatus(rank=rank, state=RankState.MISSING, note="no report yet")
    state = known.state(now)
    fields = {name: getattr(known.report, name) for name in RankStatus.__struct_fields__}
    if state not in ALIVE:
        fields |= {"note": f"no report for {now - known.reported_at:.0f} s", "bytes_per_s": 0.0}
    return RankStatus(**fields | {"state": state})


def _links(endpoints: Iterable[_Endpoint], now: float) -> tuple[LinkStatus, ...]:
    """Return each link once, as its source reports it where the source reports at all."""
    found: dict[tuple[str, str], LinkStatus] = {}
    silent = {one.report.name for one in endpoints if not one.is_alive(now)}
    for one in sorted(endpoints, key=lambda one: one.report.role == "source"):
        for link in one.report.links:
            ends = (link.source, link.target)
            rate = 0.0 if one.report.name in silent else link.bytes_per_s
            state = "silent" if silent.intersection(ends) else link.state
            found[ends] = replace(link, state=state, bytes_per_s=rate)
    return tuple(found[ends] for ends in sorted(found))


def _merge_rooms(rooms: Iterable[tuple[RoomStatus, float]]) -> tuple[RoomStatus, ...]:
    """Return each room once, the longest first. Each comes with the age of its report."""
    found: dict[str, RoomStatus] = {}
    for room, age_s in rooms:
        known = found.get(room.room) or replace(room, seconds=0.0, endpoints=())
        found[room.room] = replace(
            room,
            seconds=max(room.seconds + age_s, known.seconds),
            endpoints=known.endpoints + room.endpoints,
            request=room.request or known.request,
        )
    return tuple(sorted(found.values(), key=lambda room: -room.seconds))


def _failures(endpoints: Iterable[_Endpoint], now: float) -> tuple[FailureStatus, ...]:
    """Return failures, the latest first; of one room, the failure that came first."""
    found: dict[str, FailureStatus] = {}
    for one in endpoints:
        for failure in one.report.failures:
            ago_s, known = now - one.reported_at + failure.ago_s, found.get(failure.room)
            if known is None or ago_s > known.ago_s:
                found[failure.room] = replace(failure, ago_s=ago_s)
    return tuple(sorted(found.values(), key=lambda failure: failure.ago_s))
