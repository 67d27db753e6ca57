"""Metrics of endpoints: values in the registry, and nothing counted twice."""

from __future__ import annotations

from endpoint.jobs import over
from endpoint.scripted_machine import PLAN
from prometheus_client import CollectorRegistry

from kvferry.endpoint.handles import Handle
from kvferry.ids import Peer, Session
from kvferry.plan.choose import TransferMode
from kvferry.protocol.events import WriteFate
from kvferry.protocol.links import Link
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.protocol.states import LinkState
from kvferry.telemetry.metrics import AGES, EndpointMetrics
from kvferry.telemetry.observer import LoopStatus, RoomUsage, WaitReason

PEER = Peer("decode", 0)
FIRST = {"endpoint": "prefill/0", "transport": "nixl"}
SECOND = {"endpoint": "prefill/1", "transport": "nixl"}


def meter(registry: CollectorRegistry, labels: dict[str, str] = FIRST) -> EndpointMetrics:
    return EndpointMetrics(labels["endpoint"], labels["transport"], "source", registry)


def counted(mine: EndpointMetrics, **counts: int) -> None:
    mine.status(LoopStatus(0.0, 0, 0, 0, 0, (), counts))


def value(
    registry: CollectorRegistry, name: str, labels: dict[str, str] = FIRST, **more: str
) -> float | None:
    return registry.get_sample_value(f"kvferry_{name}", {**labels, **more})


def test_rooms_are_counted_by_outcome_and_reason() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for outcome in (Done(), Done(), Failure(FailureCode.DEADLINE, "too late")):
        mine.room_ended(Handle(1), outcome)
    assert value(registry, "rooms_total", outcome="done", reason="") == 2
    assert value(registry, "rooms_total", outcome="failed", reason="deadline") == 1
    assert mine.stats.rooms == {"done": 2, "deadline": 1}


def test_writes_are_counted_by_mode_and_failures_by_fate() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for seconds in (0.5, 0.25):
        mine.write(over(TransferMode.STAGED, seconds=seconds), 0.0)
    mine.write(over(TransferMode.STAGED, WriteFate.UNKNOWN), 0.0)
    told = {
        name: value(registry, f"{name}_total", mode="staged")
        for name in ("writes", "bytes", "pieces", "write_seconds")
    }
    assert told == {"writes": 2, "bytes": 8192, "pieces": 4, "write_seconds": 0.75}
    assert value(registry, "writes_failed_total", fate="unknown") == 1
    assert value(registry, "bytes_total", mode="slices") == 0
    stats = mine.stats.modes[TransferMode.STAGED]
    assert (stats.writes, stats.num_bytes, stats.pieces, stats.seconds) == (2, 8192, 4, 0.75)
    assert mine.stats.modes[TransferMode.RUNS].writes == 0


def test_machine_totals_are_added_once() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for count in (0, 3, 3, 5):
        counted(mine, refused=count)
    assert value(registry, "rejected_total", reason="refused") == 5
    mine.refused("connection", 2)
    assert value(registry, "rejected_total", reason="connection") == 2
    assert mine.stats.rejected == {"refused": 5, "connection": 2}


def test_no_rejections_make_no_series() -> None:
    registry = CollectorRegistry()
    counted(meter(registry), refused=0)
    assert value(registry, "rejected_total", reason="refused") is None


def test_chunks_without_a_credit_are_not_rejections() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    counted(mine, impatient=2)
    counted(mine, impatient=3)
    assert value(registry, "credit_waits_total") == 3
    assert mine.stats.rejected == {}


def test_gauges_show_the_latest_status() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    link = Link(PEER, Session(1, 1), LinkState.UP, PLAN, 1, 10.0, 0.0, 0.0)
    mine.status(LoopStatus(10.5, 3, 1, 0, 4096, [link], {}))
    mine.status(LoopStatus(10.25, 2, 0, 1024, 4096, [link], {}))
    told = [
        value(registry, name)
        for name in (
            "open_rooms",
            "quarantined_rooms",
            "heartbeat_age_seconds",
            "staging_used_bytes",
            "staging_bytes",
        )
    ]
    assert told == [2, 0, 0.25, 1024, 4096]


def test_pinned_memory_is_shown_by_age_and_reason() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    rooms = [
        RoomUsage(0.5, WaitReason.CREDIT, 4, 60, 4096),
        RoomUsage(0.9, WaitReason.CREDIT, 2, 30, 2048),
        RoomUsage(59.9, WaitReason.WRITES, 8, 128, 8192),
        RoomUsage(60.0, WaitReason.QUARANTINE, 1, 16, 1024),
    ]
    mine.status(LoopStatus(0.0, 4, 1, 0, 0, (), {}, 5, rooms))

    def by_age(name: str) -> list[float | None]:
        return [value(registry, name, side="source", age=age) for _, age in AGES]

    def waiting() -> dict[str, float | None]:
        found = {
            one: value(registry, "waiting_rooms", side="source", reason=one) for one in WaitReason
        }
        return {reason: number for reason, number in found.items() if number}

    assert by_age("pinned_pages") == [6, 0, 8, 1]
    assert by_age("pinned_tokens") == [90, 0, 128, 16]
    assert waiting() == {"credit": 2, "writes": 1, "quarantine": 1}
    assert value(registry, "quarantined_bytes", side="source") == 1024
    assert mine.stats.quarantined_bytes == 1024
    assert value(registry, "outstanding_credits", side="source") == 5
    mine.status(LoopStatus(1.0, 0, 0, 0, 0, (), {}))
    assert by_age("pinned_pages") == [0, 0, 0, 0]
    assert waiting() == {}
    mine.close()
    assert by_age("pinned_pages") == [None] * 4
    assert value(registry, "quarantined_bytes", side="source") is None


def test_endpoints_in_one_registry_have_their_own_labels() -> None:
    registry = CollectorRegistry()
    first, second = meter(registry), meter(registry, SECOND)
    first.room_ended(Handle(1), Done())
    second.room_ended(Handle(1), Done())
    second.room_ended(Handle(1), Done())
    assert value(registry, "rooms_total", FIRST, outcome="done", reason="") == 1
    assert value(registry, "rooms_total", SECOND, outcome="done", reason="") == 2
    assert (first.stats.rooms, second.stats.rooms) == ({"done": 1}, {"done": 2})


def test_machine_totals_of_two_endpoints_do_not_mix() -> None:
    registry = CollectorRegistry()
    first, second = meter(registry), meter(registry, SECOND)
    counted(first, refused=4)
    counted(second, refused=1)
    assert value(registry, "rejected_total", FIRST, reason="refused") == 4
    assert value(registry, "rejected_total", SECOND, reason="refused") == 1


def test_counters_continue_after_an_endpoint_restarts() -> None:
    registry = CollectorRegistry()
    counted(meter(registry), refused=3)
    counted(meter(registry), refused=2)
    assert value(registry, "rejected_total", reason="refused") == 5


def test_registries_do_not_mix() -> None:
    mine, other = CollectorRegistry(), CollectorRegistry()
    meter(mine).room_ended(Handle(1), Done())
    meter(other)
    assert value(mine, "rooms_total", outcome="done", reason="") == 1
    assert value(other, "rooms_total", outcome="done", reason="") is None
