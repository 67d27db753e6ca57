"""The steps of one room at all ranks, in the order in which they happened."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.plan.units import human_bytes
from kvferry.telemetry.steps import RoomTrace


class TimelineStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step that ended ``ms`` milliseconds after the first push and took ``took_ms``."""

    ms: float
    rank: str
    step: str
    took_ms: float = 0.0
    peer: str = ""
    bytes: int = 0


def timeline_of(traces: Iterable[RoomTrace | None], began: float) -> list[TimelineStep]:
    """Return the steps of a room. ``began`` is when the first rank pushed.

    All ranks must run on one host, whose monotonic clock they share.
    """
    steps = [
        TimelineStep(
            ms=round(1e3 * (step.at - began), 3),
            rank=trace.endpoint,
            step=str(step.step),
            took_ms=round(1e3 * step.seconds, 3),
            peer=step.peer,
            bytes=step.num_bytes,
        )
        for trace in traces
        if trace is not None
        for step in trace.steps
    ]
    return sorted(steps, key=lambda step: step.ms)


def print_timeline(steps: Iterable[TimelineStep]) -> None:
    """Print a line for each step."""
    for step in steps:
        took = f"took {step.took_ms:.3f}" if step.took_ms else ""
        size = human_bytes(step.bytes) if step.bytes else ""
        print(f"{step.ms:10.3f} {step.rank:<12} {step.step:<10} {step.peer:<12} {took:<12} {size}")
