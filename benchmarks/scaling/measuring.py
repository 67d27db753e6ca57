"""Processes of the scale benchmark, and how a quantity grows with its size."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent.parent / "scale.py"
# Faster growth than this exponent fails. Above 1, because small sizes have fixed costs and noise.
MAX_EXPONENT = 1.2
# A quantity that stays below this share of a core, or these bytes, has no growth to judge.
MIN_CORES, MIN_BYTES = 0.02, 8 << 20
Result = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Watched:
    """A process of which CPU time, memory and open files are read."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._cpu_s, self._at = self.cpu_s(), time.monotonic()

    def cpu_s(self) -> float:
        # The process's CPU clock, as clock_getcpuclockid(3) names it: to the nanosecond, where
        # /proc counts hundredths.
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cores(self) -> float:
        """Return the cores that the process used since the last call."""
        before, at = self._cpu_s, self._at
        self._cpu_s, self._at = self.cpu_s(), time.monotonic()
        return (self._cpu_s - before) / (self._at - at)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process whose stdin and stdout are pipes, and end it."""
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"process {process.args!r} ended early"
    return line.strip()


def quantile_ms(seconds: list[float], share: float) -> float | None:
    if not seconds:
        return None
    return round(1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 2)


def exponent(rows: list[Result], size: str, value: str, least: float) -> float | None:
    """Return the slope of log(value) over log(size); None if the largest value is below least."""
    points = [(math.log(row[size]), math.log(max(row[value], 1e-9))) for row in rows]
    if len(points) < 2 or max(row[value] for row in rows) < least:
        return None
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 2)


def growth(rows: list[Result], size: str, values: dict[str, float]) -> Result:
    """Return the exponent of each value that is large enough to judge."""
    return {value: exponent(rows, size, value, least) for value, least in values.items()}


def bars_of(part: str, exponents: Result) -> list[Result]:
    return [
        {"bar": f"{part}: {name} grows at most linearly", "value": value, "limit": MAX_EXPONENT,
         "holds": value is None or value <= MAX_EXPONENT}
        for name, value in exponents.items()
    ]  # fmt: skip
