"""Rates in an endpoint's status: bytes and rooms between two measurements."""

from __future__ import annotations

import time

from endpoint.jobs import over, write_action
from prometheus_client import CollectorRegistry

from kvferry.endpoint.handles import Handle
from kvferry.plan.choose import TransferMode
from kvferry.protocol.outcome import Done
from kvferry.telemetry.endpoint import MIN_RATE_WINDOW_S, RateMeter
from kvferry.telemetry.metrics import EndpointMetrics

PEER = write_action().transfer.peer


def test_rates_are_those_of_the_last_window() -> None:
    metrics, rates = EndpointMetrics("p/0", "shm", CollectorRegistry()), RateMeter()
    metrics.write(over(TransferMode.STAGED), 0.0)
    metrics.room_ended(Handle(1), Done())
    num_bytes = sum(metrics.sent[PEER].values())
    start = time.monotonic() + 100.0
    rates.update(metrics, start)
    metrics.write(over(TransferMode.RUNS), 0.0)
    rates.update(metrics, start + MIN_RATE_WINDOW_S / 2)
    assert rates.modes == {PEER: "staged"}, "too soon for another measurement"
    rates.update(metrics, start + 2.0)
    assert rates.bytes_per_s == {PEER: num_bytes / 2}
    assert rates.modes == {PEER: "runs"}
    assert rates.rooms_per_s == 0.0
    metrics.room_ended(Handle(2), Done())
    rates.update(metrics, start + 6.0)
    assert (rates.bytes_per_s[PEER], rates.rooms_per_s) == (0.0, 0.25)


def test_without_traffic_the_mode_with_most_bytes_is_shown() -> None:
    metrics, rates = EndpointMetrics("p/0", "shm", CollectorRegistry()), RateMeter()
    for mode in (TransferMode.STAGED, TransferMode.STAGED, TransferMode.RUNS):
        metrics.write(over(mode), 0.0)
    start = time.monotonic() + 100.0
    rates.update(metrics, start)
    rates.update(metrics, start + 10.0)
    assert (rates.bytes_per_s, rates.modes) == ({PEER: 0.0}, {PEER: "staged"})
