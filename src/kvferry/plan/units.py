"""Bytes and seconds as text for people. Nothing parses the text."""

from __future__ import annotations

import math

_BYTE_STEPS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
MIB = 1 << 20
_MOST_BYTES = 10**6 << 60
_MOST_SECONDS = 1e9
_SECOND_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def human_bytes(n: int) -> str:
    """Return bytes with a binary unit and three significant digits: ``1.50 GiB``."""
    if abs(n) < 1024:
        return f"{n} B"
    if abs(n) > _MOST_BYTES:
        return f"{'-' if n < 0 else ''}over a million EiB"
    value = float(n)
    unit = "B"
    for step in _BYTE_STEPS:
        value, unit = value / 1024, step
        # 1023.9 would be rounded to "1024", so it becomes 1.00 of the next unit.
        if abs(value) < 1023.5:
            break
    return f"{_three_digits(value)} {unit}"


def human_seconds(s: float) -> str:
    """Return seconds with a suitable unit: ``1.50 ms``, ``12.0 µs``, ``3 min 20 s``."""
    if math.isnan(s):
        return "unknown"
    if s == 0:
        return "0 s"
    if abs(s) > _MOST_SECONDS:
        return f"{'-' if s < 0 else ''}over 30 years"
    if abs(s) >= 59.95:
        minutes, seconds = divmod(round(abs(s)), 60)
        return f"{'-' if s < 0 else ''}{minutes} min {seconds} s"
    for scale, unit in _SECOND_STEPS:
        if abs(s) >= scale * 0.9995:
            return f"{_three_digits(s / scale)} {unit}"
    return "<1 ns" if s > 0 else ">-1 ns"


def _three_digits(value: float) -> str:
    """Return three significant digits without an exponent, or a whole number above a thousand."""
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
