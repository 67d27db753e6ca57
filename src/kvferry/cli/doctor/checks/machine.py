"""The machine itself: system, clock, and how many files a process may open."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import kvferry
from kvferry.cli.doctor.checks.check import Check, State, lacking, ok
from kvferry.plan.units import human_seconds

AREA = "machine"

CLOCKSOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"
# Reading these takes a microsecond or more, and a busy endpoint reads the clock all the time.
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
# The beginning of 2025. A clock before that was never set.
EARLIEST = 1_735_689_600

# Open files of an endpoint: what the process and its transport hold anyway, and for each peer a
# control connection (four with its monitor), a lifeline, and what a transport opens.
FILES_ANYWAY = 128
FILES_PER_PEER = 8
FEW_PEERS = 64


def system() -> Iterator[Check]:
    """What this is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield ok(
        AREA,
        "system",
        f"kvferry {kvferry.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {platform.machine()}, {cores} cores",
    )


def clock(root: Path = Path("/")) -> Iterator[Check]:
    """Whether time goes on as deadlines and signatures need it."""
    resolution_s = time.get_clock_info("monotonic").resolution
    source = read(root / CLOCKSOURCE)
    yield judge_clock(time.time(), resolution_s, source)


def judge_clock(now: float, resolution_s: float, source: str | None) -> Check:
    """A clock that was never set, that is coarse, or that is slow to read."""
    if now < EARLIEST:
        told = f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}"
        remedy = "set it, for instance with chrony: signed requests need clocks within 5 minutes"
        return Check(AREA, "clock", State.NOTE, told, remedy)
    if resolution_s > 1e-3:
        told = f"the clock counts in steps of {human_seconds(resolution_s)}"
        remedy = "deadlines are that coarse; use a kernel with high-resolution timers"
        return Check(AREA, "clock", State.NOTE, told, remedy)
    if source in SLOW_CLOCKS:
        told = f"the kernel's clock source is {source}, which is slow to read"
        remedy = f"if the processor has a stable tsc, write tsc to /{CLOCKSOURCE}"
        return Check(AREA, "clock", State.NOTE, told, remedy)
    return ok(AREA, "clock", f"steps of {human_seconds(resolution_s)}, {source or 'own'} source")


def files(num_peers: int | None) -> Iterator[Check]:
    """Whether a process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_files(soft, hard, num_peers)


def judge_files(soft: int, hard: int, num_peers: int | None) -> Check:
    """The limit against the peers of the given layouts, or against a few."""
    infinite = soft == resource.RLIM_INFINITY
    allowed = max(0, (soft - FILES_ANYWAY) // FILES_PER_PEER)
    needed = FEW_PEERS if num_peers is None else num_peers
    shown = "any number of open files" if infinite else f"{soft} open files"
    if infinite or allowed >= needed:
        enough = "enough" if infinite else f"enough for about {allowed} peers"
        return ok(AREA, "files", f"{shown}, {enough}")
    wanted = FILES_ANYWAY + needed * FILES_PER_PEER
    can = hard == resource.RLIM_INFINITY or hard >= wanted
    how = "" if can else f" (the hard limit is {hard}: as root, or with LimitNOFILE= of systemd)"
    return lacking(
        AREA,
        "files",
        f"{shown} are enough for about {allowed} peers, not for {needed}",
        needed=num_peers is not None,
        remedy=f"ulimit -n {wanted} before the engine starts{how}",
    )


def read(path: Path) -> str | None:
    """A file of the kernel's, or None where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
