"""The watchdog: which threads it reports as stalled, and when."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvferry.endpoint.watchdog import ThreadHeartbeat, WatchedThreads


class Bench(NamedTuple):
    """A thread's heartbeat, its pending work, and the reports about it."""

    heartbeat: ThreadHeartbeat
    work: list[str]
    watched: WatchedThreads
    reports: list[tuple[str, float]]


@pytest.fixture
def bench() -> Bench:
    work: list[str] = []
    reports: list[tuple[str, float]] = []
    heartbeat = ThreadHeartbeat("transport", lambda: bool(work))
    watched = WatchedThreads([heartbeat], 5.0, lambda *what: reports.append(what))
    return Bench(heartbeat, work, watched, reports)


def test_a_thread_without_work_may_sleep_for_ever(bench: Bench) -> None:
    bench.heartbeat.beat(float("inf"))
    for now in (0.0, 100.0, 1e6):
        bench.watched.check(now)
    assert bench.reports == []


def test_a_thread_that_misses_its_due_time_is_reported(bench: Bench) -> None:
    bench.heartbeat.beat(10.0)
    bench.watched.check(14.0)
    assert bench.reports == []
    bench.watched.check(16.0)
    assert bench.reports == [("transport", 6.0)]
    bench.heartbeat.beat(20.0)
    bench.watched.check(17.0)
    assert bench.reports == [("transport", 6.0), ("transport", 0.0)]
    bench.watched.check(18.0)
    assert len(bench.reports) == 2


def test_a_thread_that_ignores_its_work_is_reported(bench: Bench) -> None:
    bench.heartbeat.beat(float("inf"))
    bench.watched.check(100.0)
    bench.work.append("a write")
    bench.watched.check(104.0)
    assert bench.reports == []
    bench.watched.check(105.5)
    assert bench.reports == [("transport", 5.5)]


def test_a_busy_thread_that_beats_is_not_reported(bench: Bench) -> None:
    bench.work.append("a write")
    for now in range(0, 100, 4):
        bench.heartbeat.beat(float(now))
        bench.watched.check(float(now))
    assert bench.reports == []
