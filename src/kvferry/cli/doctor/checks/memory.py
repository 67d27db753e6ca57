"""Memory that peers write into: shared memory, pinned memory, huge pages."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.cli.doctor.checks.capabilities import Capability, has_capability
from kvferry.cli.doctor.checks.check import Asked, Check, State, lacking, ok
from kvferry.cli.doctor.checks.machine import read
from kvferry.plan.units import human_bytes
from kvferry.transports import segments

AREA = "memory"

SHM = Path("/dev/shm")
HUGE = "sys/kernel/mm/transparent_hugepage/enabled"
# A container that nobody told otherwise has 64 MiB.
LITTLE_BYTES = 1 << 30
# While it starts, NIXL's UCX takes 16 MiB of it and some more, and crashes if it can't.
NIXL_BYTES = 32 << 20
ENLARGE = (
    "enlarge /dev/shm: docker run --shm-size=16g or --ipc=host, an emptyDir of medium Memory, "
    "or mount -o remount,size=16g /dev/shm"
)


class Need(NamedTuple):
    """What must find room in shared memory."""

    what: str
    num_bytes: int


def need(asked: Asked, request_bytes: int | None) -> Need | None:
    """What the transport takes of it, as far as that is known."""
    if asked.needs("shm") and request_bytes is not None:
        return Need("one request at decode", request_bytes)
    return Need("starting NIXL", NIXL_BYTES) if asked.needs("nixl") else None


def shared_memory(asked: Asked, request_bytes: int | None) -> Iterator[Check]:
    """Whether shared memory can be had, and how much."""
    problem = segments.problem()
    if problem:
        yield lacking(AREA, "shared memory", problem, needed=asked.needs("shm"))
        return
    # Linux has a file system for it. Elsewhere it is limited by memory alone.
    if sys.platform == "linux" and SHM.is_dir():
        found = os.statvfs(SHM)
        sizes = found.f_frsize * found.f_bavail, found.f_frsize * found.f_blocks
        yield judge_room(*sizes, need(asked, request_bytes))
    else:
        yield ok(AREA, "shared memory", "can be had; this system sets it no limit of its own")
    yield ok(
        AREA,
        "segment space",
        f"{segments.space()}: shm peers must show the same, and run as the same user",
    )


def judge_room(free_bytes: int, total_bytes: int, needed: Need | None) -> Check:
    """The room in shared memory against what must find room there."""
    shown = f"{human_bytes(free_bytes)} of {human_bytes(total_bytes)} free"
    if needed is not None and needed.num_bytes > free_bytes:
        told = f"{shown}, and {needed.what} takes {human_bytes(needed.num_bytes)}"
        return Check(AREA, "shared memory", State.PROBLEM, told, ENLARGE)
    if total_bytes < LITTLE_BYTES:
        told = f"{shown}, which is little for pools"
        return Check(AREA, "shared memory", State.NOTE, told, ENLARGE)
    return ok(AREA, "shared memory", shown)


def left_over() -> Iterator[Check]:
    """Memory of workers that were killed together with what cleans up after them."""
    found = [f"{path} ({human_bytes(path.stat().st_size)})" for path in segments.leftovers()]
    if not found:
        yield ok(AREA, "leftovers", "none")
        return
    yield lacking(
        AREA,
        "leftovers",
        f"processes that were killed left {', '.join(found)}",
        needed=False,
        remedy="start any worker or endpoint on this host, which removes them, or remove them",
    )


def pinned_memory(asked: Asked, has_rdma: bool) -> Iterator[Check]:
    """Whether a network card may be given memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    may = has_capability(Capability.IPC_LOCK)
    yield judge_pinned(limit, may, needed=has_rdma and asked.transports != ("shm",))


def judge_pinned(limit_bytes: int | None, may_exceed: bool, *, needed: bool) -> Check:
    """RDMA pins the pools and the staging slots, all of them."""
    if limit_bytes is None:
        return ok(AREA, "pinned memory", "no limit")
    shown = f"at most {human_bytes(limit_bytes)} a process"
    if may_exceed:
        return ok(AREA, "pinned memory", f"{shown}, but this one may exceed it (CAP_IPC_LOCK)")
    if not needed:
        return ok(AREA, "pinned memory", f"{shown}; only RDMA would need more")
    return lacking(
        AREA,
        "pinned memory",
        f"{shown}, and RDMA pins the pools",
        needed=True,
        remedy="ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity",
    )


def huge_pages(root: Path = Path("/")) -> Iterator[Check]:
    """Whether staging slots get huge pages."""
    text = read(root / HUGE)
    chosen = re.search(r"\[(\w+)\]", text or "")
    if chosen is None:
        yield ok(AREA, "huge pages", "this system has no switch for them")
    elif chosen[1] == "never":
        yield lacking(
            AREA,
            "huge pages",
            "switched off, so copies through staging slots are several percent slower",
            needed=False,
            remedy=f"echo madvise > /{HUGE}",
        )
    else:
        yield ok(AREA, "huge pages", f"{chosen[1]}: staging slots get them")
