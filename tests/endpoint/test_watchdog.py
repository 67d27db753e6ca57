"""The watchdog: which threads it reports as stalled, and when."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvferry.endpoint.watchdog import ThreadHeartbeat, WatchedThreads


class Desk(NamedTuple):
    """A thread's heartbeat, its pending work, and the reports about it."""

    heartbeat: ThreadHeartbeat
    work: list[str]
    watched: WatchedThreads
    reports: list[tuple[str, float]]


@pytest.fixture
def desk() -> Desk:
    work: list[str] = []
    reports: list[tuple[str, float]] = []
    heartbeat = ThreadHeartbeat("transport", lambda: bool(work))
    watched = WatchedThreads([heartbeat], 5.0, lambda *what: reports.append(what))
    return Desk(heartbeat, work, watched, reports)


def test_a_thread_without_work_may_sleep_for_ever(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    for now in (0.0, 100.0, 1e6):
        desk.watched.check(now)
    assert desk.reports == []


def test_a_thread_that_misses_its_due_time_is_reported(desk: Desk) -> None:
    desk.heartbeat.beat(10.0)
    desk.watched.check(14.0)
    assert desk.reports == []
    desk.watched.check(16.0)
    assert desk.reports == [("transport", 6.0)]
    desk.heartbeat.beat(20.0)
    desk.watched.check(17.0)
    assert desk.reports == [("transport", 6.0), ("transport", 0.0)]
    desk.watched.check(18.0)
    assert len(desk.reports) == 2


def test_a_thread_that_ignores_its_work_is_reported(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    desk.watched.check(100.0)
    desk.work.append("a write")
    desk.watched.check(104.0)
    assert desk.reports == []
    desk.watched.check(105.5)
    assert desk.reports == [("transport", 5.5)]


def test_a_busy_thread_that_beats_is_not_reported(desk: Desk) -> None:
    desk.work.append("a write")
    for now in range(0, 100, 4):
        desk.heartbeat.beat(float(now))
        desk.watched.check(float(now))
    assert desk.reports == []
