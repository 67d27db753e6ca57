"""Rates in an endpoint's status: bytes and rooms between two measurements."""

from __future__ import annotations

import time

import pytest
from endpoint.jobs import over, write_action
from prometheus_client import CollectorRegistry

from kvferry.endpoint.handles import Handle
from kvferry.plan.choose import TransferMode
from kvferry.protocol.outcome import Done
from kvferry.telemetry.endpoint import MIN_RATE_WINDOW_S, RateMeter
from kvferry.telemetry.metrics import EndpointMetrics

PEER = write_action().transfer.peer


def test_rates_are_those_of_the_last_window() -> None:
    metrics, rates = EndpointMetrics("p/0", "shm", "source", CollectorRegistry()), RateMeter()

    def update(now: float) -> None:
        rates.update(metrics.sent, metrics.stats.rooms.total(), now)

    metrics.write(over(TransferMode.STAGED), 0.0)
    metrics.room_ended(Handle(1), Done())
    num_bytes = sum(metrics.sent[PEER].values())
    start = time.monotonic() + 100.0
    update(start)
    metrics.write(over(TransferMode.RUNS), 0.0)
    update(start + MIN_RATE_WINDOW_S / 2)
    assert rates.rooms_per_s > 0, "too soon for another measurement"
    update(start + 2.0)
    assert rates.bytes_per_s == {PEER: pytest.approx(num_bytes / 2)}
    assert rates.rooms_per_s == 0.0
    metrics.room_ended(Handle(2), Done())
    update(start + 6.0)
    assert (rates.bytes_per_s[PEER], rates.rooms_per_s) == (0.0, 0.25)
