"""The meter: counts arrive in a registry of one's own, and nothing is counted twice."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from runtime.jobs import over

from kvferry.plan.choose import Path
from kvferry.protocol.events import Fate
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.runtime.telemetry.metrics import Meter

FIRST = {"endpoint": "prefill/0", "transport": "nixl"}
SECOND = {"endpoint": "prefill/1", "transport": "nixl"}


def meter(registry: CollectorRegistry, labels: dict[str, str] = FIRST) -> Meter:
    return Meter(labels["endpoint"], labels["transport"], registry)


def value(
    registry: CollectorRegistry, name: str, labels: dict[str, str] = FIRST, **more: str
) -> float | None:
    return registry.get_sample_value(f"kvferry_{name}", {**labels, **more})


def test_rooms_are_counted_by_outcome_and_reason() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for outcome in (Done(), Done(), Failure(FailureCode.DEADLINE, "too late")):
        mine.ended(outcome)
    assert value(registry, "rooms_total", outcome="done", reason="") == 2
    assert value(registry, "rooms_total", outcome="failed", reason="deadline") == 1
    assert mine.stats.rooms == {"done": 2, "deadline": 1}


def test_writes_are_counted_by_path_and_failures_by_fate() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for seconds in (0.5, 0.25):
        mine.wrote(over(Path.STAGED, seconds=seconds))
    mine.wrote(over(Path.STAGED, Fate.UNKNOWN))
    told = {
        name: value(registry, f"{name}_total", path="staged")
        for name in ("writes", "bytes", "pieces", "write_seconds")
    }
    assert told == {"writes": 2, "bytes": 8192, "pieces": 4, "write_seconds": 0.75}
    assert value(registry, "writes_failed_total", fate="unknown") == 1
    assert value(registry, "bytes_total", path="slices") == 0
    stats = mine.stats.paths[Path.STAGED]
    assert (stats.writes, stats.num_bytes, stats.pieces, stats.seconds) == (2, 8192, 4, 0.75)
    assert mine.stats.paths[Path.RUNS].writes == 0


def test_a_total_adds_only_what_is_new() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    for count in (0, 3, 3, 5, 4):
        mine.total("connection", count)
    assert value(registry, "refusals_total", what="connection") == 5
    mine.refused("connection")
    mine.total("connection", 6)
    assert value(registry, "refusals_total", what="connection") == 7
    assert mine.stats.refusals == {"connection": 7}


def test_nothing_refused_is_no_series() -> None:
    registry = CollectorRegistry()
    meter(registry).total("connection", 0)
    assert value(registry, "refusals_total", what="connection") is None


def test_parcels_without_a_credit_are_no_refusals() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    mine.total("impatient", 2)
    mine.total("impatient", 3)
    assert value(registry, "credit_waits_total") == 3
    assert mine.stats.refusals == {}


def test_how_things_stand_is_told_as_it_is_now() -> None:
    registry = CollectorRegistry()
    mine = meter(registry)
    mine.now(open_rooms=3, quarantined=1, age_s=0.5)
    mine.now(open_rooms=2, quarantined=0, age_s=0.25)
    mine.staging(1024, 4096)
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


def test_endpoints_of_one_registry_differ_in_their_labels() -> None:
    registry = CollectorRegistry()
    first, second = meter(registry), meter(registry, SECOND)
    first.ended(Done())
    second.ended(Done())
    second.ended(Done())
    assert value(registry, "rooms_total", FIRST, outcome="done", reason="") == 1
    assert value(registry, "rooms_total", SECOND, outcome="done", reason="") == 2
    assert (first.stats.rooms, second.stats.rooms) == ({"done": 1}, {"done": 2})


def test_totals_of_two_endpoints_do_not_mix() -> None:
    registry = CollectorRegistry()
    first, second = meter(registry), meter(registry, SECOND)
    first.total("refused", 4)
    second.total("refused", 1)
    assert value(registry, "refusals_total", FIRST, what="refused") == 4
    assert value(registry, "refusals_total", SECOND, what="refused") == 1


def test_a_second_life_of_an_endpoint_goes_on_counting() -> None:
    registry = CollectorRegistry()
    meter(registry).total("connection", 3)
    meter(registry).total("connection", 2)
    assert value(registry, "refusals_total", what="connection") == 5


def test_registries_do_not_mix() -> None:
    mine, other = CollectorRegistry(), CollectorRegistry()
    meter(mine).ended(Done())
    meter(other)
    assert value(mine, "rooms_total", outcome="done", reason="") == 1
    assert value(other, "rooms_total", outcome="done", reason="") is None
