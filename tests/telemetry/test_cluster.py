"""Cluster status: reports merged into one document, and the requests sent in return."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from telemetry.recorded import source, target

from kvferry.layout import Layout, Parallel, attention
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.cluster import (
    FORGET_S,
    GONE_S,
    UNWATCHED_S,
    WATCHED_S,
    ClusterMonitor,
)
from kvferry.telemetry.status import (
    EndpointStatus,
    FailureStatus,
    LinkStatus,
    RankState,
    RoomStatus,
)


def layout(num_ranks: int) -> Layout:
    return Layout(attention(layers=1, kv_heads=2, head_dim=8), Parallel(tp=num_ranks))


def view(role: str = "source", rank: int = 0, clock: float = 0.0, **more: Any) -> EndpointStatus:
    fields: dict[str, Any] = {
        "instance": "p" if role == "source" else "d",
        "rank": rank,
        "role": role,
        "incarnation": 1,
        "clock": clock,
        "wall": 1e9 + clock,
        "transport": "shm",
        "layout": layout(2 if role == "source" else 1),
    }
    return EndpointStatus(**(fields | more))


def sent(num_bytes: int, bytes_per_s: float = 0.0) -> tuple[LinkStatus, ...]:
    link = LinkStatus(source="p/0", target="d/0", state="up", num_bytes=num_bytes)
    return (msgspec.structs.replace(link, bytes_per_s=bytes_per_s),)


def look(monitor: ClusterMonitor, now: float) -> Any:
    return monitor.status(now, 1e9 + now, "discovery")


def test_rates_are_the_sum_of_what_living_sources_report() -> None:
    monitor = ClusterMonitor()
    monitor.take(view(links=sent(2100, 1000.0)), 0.0)
    monitor.take(view("target", rooms_per_s=2.5), 0.0)
    shown = look(monitor, 0.0)
    (link,) = shown.links
    assert (link.source, link.target, link.num_bytes) == ("p/0", "d/0", 2100)
    assert (shown.bytes_per_s, shown.rooms_per_s) == (1000.0, 2.5)
    late = look(monitor, GONE_S + 1)
    assert (late.bytes_per_s, late.rooms_per_s, late.links[0].state) == (0.0, 0.0, "silent")


def test_a_link_is_shown_once_as_its_source_reports_it() -> None:
    monitor = ClusterMonitor()
    offset = Offset(0.0, 0.001)
    mine = LinkStatus(source="p/0", target="d/0", state="up", offset=offset)
    monitor.take(view("target", links=(mine,)), 0.0)
    assert [link.offset for link in look(monitor, 0.0).links] == [offset]
    monitor.take(view(links=sent(5)), 0.0)
    assert [(link.num_bytes, link.source) for link in look(monitor, 0.0).links] == [(5, "p/0")]


def test_an_endpoint_becomes_silent_then_gone_then_forgotten() -> None:
    monitor = ClusterMonitor()
    monitor.take(view("target", num_done=3), 0.0)

    def state(now: float) -> list[RankState]:
        return [rank.state for one in look(monitor, now).instances for rank in one.ranks]

    assert state(1.0) == [RankState.UP]
    assert state(15.0) == [RankState.SILENT]
    (instance,) = look(monitor, 15.0).instances
    assert instance.note == "no report from rank 0"
    assert state(GONE_S + 1) == [RankState.GONE]
    monitor.forget(FORGET_S + 1)
    assert state(FORGET_S + 1) == []


def test_a_rank_without_reports_is_missing() -> None:
    monitor = ClusterMonitor()
    monitor.take(view(rank=1), 0.0)
    (instance,) = look(monitor, 0.0).instances
    assert [rank.state for rank in instance.ranks] == [RankState.MISSING, RankState.UP]
    assert instance.note == "no report from rank 0"
    monitor.take(view(rank=0), 0.0)
    (whole,) = look(monitor, 0.0).instances
    assert whole.note == ""


def test_leaving_removes_an_endpoint() -> None:
    monitor = ClusterMonitor()
    monitor.take(view("target"), 0.0)
    assert not monitor.leave("d/0", 2)
    assert monitor.leave("d/0", 1)
    assert look(monitor, 0.0).instances == ()


def test_reports_come_more_often_while_somebody_watches() -> None:
    monitor = ClusterMonitor()
    assert monitor.take(view(), 100.0).every_s == UNWATCHED_S
    look(monitor, 100.0)
    assert monitor.take(view(), 101.0).every_s == WATCHED_S
    assert monitor.take(view(), 200.0).every_s == UNWATCHED_S


def test_the_layout_of_an_instance_is_that_of_any_rank() -> None:
    monitor = ClusterMonitor()
    monitor.take(view(rank=1), 0.0)
    assert monitor.layout_of("p") == layout(2)
    assert monitor.layout_of("d") is None
    (instance,) = look(monitor, 0.0).instances
    assert (instance.sharding, len(instance.ranks)) == (str(layout(2)), 2)


def test_a_trace_is_requested_once_from_each_endpoint() -> None:
    monitor = ClusterMonitor()
    monitor.take(view(), 0.0)
    monitor.take(view("target"), 0.0)
    monitor.query_trace("17", 1.0)
    assert not monitor.is_answered("17", 1.0)
    assert monitor.take(view(clock=1.0), 1.0).rooms == ("17",)
    assert monitor.take(view(clock=2.0, traces=(source(),)), 1.1).rooms == ()
    assert not monitor.is_answered("17", 1.1)
    assert monitor.take(view("target", clock=1.0), 1.2).rooms == ("17",)
    assert not monitor.is_answered("17", 1.2), "who was asked just now has not answered yet"
    monitor.take(view("target", clock=1.1, traces=(target(),)), 1.3)
    assert monitor.is_answered("17", 1.3)
    trace = monitor.waterfall("17")
    assert trace is not None
    assert {bar.endpoint for bar in trace.bars} == {"p/0", "d/0"}
    assert monitor.waterfall("18") is None


def test_a_report_without_the_trace_counts_as_an_answer() -> None:
    monitor = ClusterMonitor()
    monitor.take(view(), 0.0)
    monitor.query_trace("17", 1.0)
    assert monitor.take(view(clock=1.0), 1.0).rooms == ("17",)
    assert not monitor.is_answered("17", 1.0)
    monitor.take(view(clock=1.1), 1.1)
    assert monitor.is_answered("17", 1.1)


def test_rooms_and_failures_are_merged() -> None:
    monitor = ClusterMonitor()
    room = RoomStatus(room="17", status="moving", seconds=4.0, endpoints=("p/0",))
    late = FailureStatus(room="16", endpoint="d/0", ago_s=2.0, code="aborted", reason="told so")
    early = FailureStatus(room="16", endpoint="p/0", ago_s=3.0, code="peer-gone", reason="lost d/0")
    monitor.take(view(clock=10.0, rooms=(room,), failures=(early,)), 0.0)
    waiting = msgspec.structs.replace(room, status="waiting", seconds=3.0, endpoints=("d/0",))
    monitor.take(view("target", clock=10.0, rooms=(waiting,), failures=(late,)), 0.0)
    shown = look(monitor, 1.0)
    assert [(one.room, one.status, one.seconds) for one in shown.rooms] == [("17", "waiting", 5.0)]
    assert shown.rooms[0].endpoints == ("p/0", "d/0")
    (failure,) = shown.failures
    assert (failure.code, failure.endpoint) == ("peer-gone", "p/0")
    assert failure.ago_s == pytest.approx(4.0)
