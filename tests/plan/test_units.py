"""Tests of bytes and seconds as text: three digits, and a larger unit before 1000."""

from __future__ import annotations

import math

import pytest

from kvferry.plan.units import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024 + 1, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (2 * 1024**3, "2.00 GiB"),
        (1000 * 1024**2, "1000 MiB"),
        (3 * 1024**6, "3.00 EiB"),
        (5000 * 1024**6, "5000 EiB"),
        (-2048, "-2.00 KiB"),
        (10**400, "over a million EiB"),
        (-(10**400), "-over a million EiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.5, "1.50 s"),
        (0.0015, "1.50 ms"),
        (12e-6, "12.0 µs"),
        (0.9999e-3, "1.00 ms"),
        (250e-9, "250 ns"),
        (1e-12, "<1 ns"),
        (59.96, "1 min 0 s"),
        (200.0, "3 min 20 s"),
        (-0.25, "-250 ms"),
        (5e-324, "<1 ns"),
        (1e308, "over 30 years"),
        (math.inf, "over 30 years"),
        (-math.inf, "-over 30 years"),
        (math.nan, "unknown"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
