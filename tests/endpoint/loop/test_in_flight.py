"""Writes that an owner has begun itself: how often it asks after them, and what it hears."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest
from endpoint.jobs import direct

from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.loop.in_flight import FRESH_S, WritesInFlight
from kvferry.endpoint.poll_backoff import MOST_S, NAP_S, PART
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.transports.base import WriteEnded


class Carrier:
    """A transport whose writes end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Op] = []
        self.ends: dict[Op, WriteEnded] = {}

    def check_write(self, op: Op) -> WriteEnded | None:
        self.asked.append(op)
        return self.ends.pop(op, None)


def begun(op: int, started: float) -> WriteJob:
    job = direct(op, Binding(()))
    job.started = started
    return job


def underway_with(carrier: Any, *started: float) -> WritesInFlight:
    underway = WritesInFlight()
    for number, at in enumerate(started):
        underway.add(begun(number, at), carrier)
    return underway


def test_nobody_is_woken_for_nothing() -> None:
    assert WritesInFlight().wakeup() == inf
    assert not list(WritesInFlight().ended(1.0))


@pytest.mark.parametrize("fate", [None, WriteFate.FAILED, WriteFate.UNKNOWN])
def test_an_end_is_told_once_with_what_it_was(fate: WriteFate | None) -> None:
    carrier = Carrier()
    underway = underway_with(carrier, 10.0)
    carrier.ends[Op(0)] = WriteEnded(Op(0), fate, "why")
    (end,) = underway.ended(11.0)
    assert (end.op, end.is_over, end.fate, end.detail) == (0, True, fate, "why")
    assert not list(underway.ended(12.0))
    assert underway.wakeup() == inf


def test_it_asks_no_earlier_than_it_said_and_ever_less_often() -> None:
    carrier = Carrier()
    underway = underway_with(carrier, 10.0)
    now, times = 10.0, list[float]()
    while now < 10.2:
        wakeup = underway.wakeup()
        assert wakeup > now
        assert not list(underway.ended(now + (wakeup - now) / 2))
        assert len(carrier.asked) == len(times)
        now = wakeup
        assert not list(underway.ended(now))
        times.append(now)
        assert len(carrier.asked) == len(times)
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] == pytest.approx(NAP_S, abs=1e-6)
    assert all(
        pause <= max(NAP_S, PART * (at - 10.0)) + 1e-9
        for pause, at in zip(pauses, times, strict=False)
    )
    assert pauses[-1] == pytest.approx(MOST_S)
    # A core that asked every time it could would ask thousands of times.
    assert len(times) < 200


def test_each_write_has_a_pace_of_its_own() -> None:
    carrier = Carrier()
    underway = underway_with(carrier, 10.0, 10.5)
    assert not list(underway.ended(10.5))
    assert carrier.asked == [0]
    assert underway.wakeup() == pytest.approx(10.5 + NAP_S)
    carrier.ends[Op(1)] = WriteEnded(Op(1), None)
    assert [end.op for end in underway.ended(10.5 + NAP_S)] == [1]
    assert carrier.asked == [0, 1]
    assert underway.wakeup() == pytest.approx(10.5 + MOST_S)


def test_a_write_is_fresh_for_a_while() -> None:
    underway = underway_with(Carrier(), 10.0)
    assert underway.has_fresh(10.0 + FRESH_S / 2)
    assert not underway.has_fresh(10.0 + 2 * FRESH_S)
    underway.add(begun(1, 11.0), Carrier())  # type: ignore[arg-type]
    assert underway.has_fresh(11.0 + FRESH_S / 2)
    assert not WritesInFlight().has_fresh(10.0)
