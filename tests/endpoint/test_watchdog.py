"""The watchdog: which threads it reports as stalled, and when."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvferry.endpoint.watchdog import ThreadHeartbeat, WatchedThreads


class Desk(NamedTuple):
    """A thread's heartbeat, its work, and what was said of it."""

    heartbeat: ThreadHeartbeat
    work: list[str]
    watched: WatchedThreads
    told: list[tuple[str, float]]


@pytest.fixture
def desk() -> Desk:
    work: list[str] = []
    told: list[tuple[str, float]] = []
    heartbeat = ThreadHeartbeat("transport_thread", lambda: bool(work))
    watched = WatchedThreads([heartbeat], 5.0, lambda *what: told.append(what))
    return Desk(heartbeat, work, watched, told)


def test_a_thread_with_nothing_to_do_may_sleep_for_ever(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    for now in (0.0, 100.0, 1e6):
        desk.watched.check(now)
    assert desk.told == []


def test_a_thread_that_sleeps_past_its_own_time_is_told_of(desk: Desk) -> None:
    desk.heartbeat.beat(10.0)
    desk.watched.check(14.0)
    assert desk.told == []
    desk.watched.check(16.0)
    assert desk.told == [("transport_thread", 6.0)]
    desk.heartbeat.beat(20.0)
    desk.watched.check(17.0)
    assert desk.told == [("transport_thread", 6.0), ("transport_thread", 0.0)]
    desk.watched.check(18.0)
    assert len(desk.told) == 2


def test_a_thread_that_does_not_touch_its_work_is_told_of(desk: Desk) -> None:
    desk.heartbeat.beat(float("inf"))
    desk.watched.check(100.0)
    desk.work.append("a write")
    desk.watched.check(104.0)
    assert desk.told == []
    desk.watched.check(105.5)
    assert desk.told == [("transport_thread", 5.5)]


def test_a_thread_that_always_has_work_and_does_it_is_well(desk: Desk) -> None:
    desk.work.append("a write")
    for now in range(0, 100, 4):
        desk.heartbeat.beat(float(now))
        desk.watched.check(float(now))
    assert desk.told == []
