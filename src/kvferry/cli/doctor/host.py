"""Checks of the host: open files, memory, writes between processes, the copy loop."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import secrets
import sys
from enum import IntEnum
from pathlib import Path

import kvferry
from kvferry.cli.doctor import REPORT, Area, DoctorRequest, Finding, read_kernel_file
from kvferry.cli.doctor.probes import PIECE_BYTES, ProbeFailed, run_probe
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.transports import segments

MACHINE, MEMORY, COPIES = Area("machine"), Area("memory"), Area("copies")
CMA, CMA_NAME = Area("one-copy writes"), "other processes"
UNLIMITED = resource.RLIM_INFINITY

# Open files of an endpoint: those of the process and its transport, and for each peer a control
# connection (four with its monitor), a liveness connection, and those of the transport.
BASE_FILES = 128
FILES_PER_PEER = 8
FEW_PEERS = 64

SHM = Path("/dev/shm")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# A container's default is 64 MiB.
LITTLE_BYTES = 1 << 30
# UCX takes 16 MiB and some more while NIXL starts, and crashes if it cannot.
NIXL_BYTES = 32 << 20
ENLARGE = (
    "enlarge /dev/shm: docker run --shm-size=16g or --ipc=host, an emptyDir of medium Memory, "
    "or mount -o remount,size=16g /dev/shm"
)

PROCESS_STATUS = Path("/proc/self/status")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# prctl(2): which processes besides an ancestor may access this process's memory.
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = ctypes.c_ulong(-1), ctypes.c_ulong(0)

SLOW_COPY_RATIO = 0.6


class Capability(IntEnum):
    """A Linux capability by its number (capabilities(7))."""

    IPC_LOCK = 14
    SYS_PTRACE = 19


def has_capability(which: Capability, status: Path = PROCESS_STATUS) -> bool:
    """Return whether this process has the capability in effect."""
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_kernel_file(status) or "", re.M)
    return mask is not None and bool(int(mask[1], 16) >> which & 1)


# ---------------------------------------------------------------- machine


def check_system() -> Finding:
    """Name the versions and the processor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"kvferry {kvferry.__version__}, Python {platform.python_version()}"
    kernel = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return MACHINE.ok("system", f"{versions}, {kernel}, {cores} cores")


def check_files(num_peers: int | None, limits: tuple[int, int] | None = None) -> Finding:
    """Check that a process may open files for the peers of the given layouts, or for 64."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == UNLIMITED:
        return MACHINE.ok("files", "any number of open files, enough")
    possible = max(0, (soft - BASE_FILES) // FILES_PER_PEER)
    needed = FEW_PEERS if num_peers is None else num_peers
    if possible >= needed:
        return MACHINE.ok("files", f"{soft} open files, enough for about {possible} peers")
    wanted = BASE_FILES + needed * FILES_PER_PEER
    can = hard == UNLIMITED or hard >= wanted
    how = "" if can else f" (the hard limit is {hard}: as root, or with LimitNOFILE= of systemd)"
    detail = f"{soft} open files are enough for about {possible} peers, not for {needed}"
    remedy = f"ulimit -n {wanted} before the engine starts{how}"
    return MACHINE.issue("files", detail, remedy, needed=num_peers is not None)


# ---------------------------------------------------------------- memory


def check_shm(request: DoctorRequest, request_bytes: int | None) -> list[Finding]:
    """Check that shared memory is available and large enough."""
    name = "shared memory"
    problem = segments.problem()
    if problem:
        return [MEMORY.issue(name, problem, needed=request.needs("shm"))]
    # Linux has a file system for it. Elsewhere only the size of memory limits it.
    room = MEMORY.ok(name, "available; this system sets no limit of its own")
    if sys.platform == "linux" and SHM.is_dir():
        found = os.statvfs(SHM)
        free_bytes, total_bytes = found.f_frsize * found.f_bavail, found.f_frsize * found.f_blocks
        room = judge_shm(free_bytes, total_bytes, request, request_bytes)
    same = f"{segments.space()}: shm peers must show the same and run as the same user"
    return [room, MEMORY.ok("segment space", same)]


def judge_shm(
    free_bytes: int, total_bytes: int, request: DoctorRequest, request_bytes: int | None
) -> Finding:
    """Judge the size of /dev/shm by what the transport puts there, as far as that is known."""
    name, shown = "shared memory", f"{human_bytes(free_bytes)} of {human_bytes(total_bytes)} free"
    needs = {"one request at decode": request_bytes or 0} if request.needs("shm") else {}
    if request.needs("nixl"):
        needs["starting NIXL"] = NIXL_BYTES
    for what, num_bytes in needs.items():
        if num_bytes > free_bytes:
            detail = f"{shown}, and {what} takes {human_bytes(num_bytes)}"
            return MEMORY.problem(name, detail, ENLARGE)
    if total_bytes < LITTLE_BYTES:
        return MEMORY.note(name, f"{shown}, which is little for pools", ENLARGE)
    return MEMORY.ok(name, shown)


def check_leftovers() -> Finding:
    """List shared memory of workers that were killed together with their cleanup process."""
    found = [f"{path} ({human_bytes(path.stat().st_size)})" for path in segments.leftovers()]
    if not found:
        return MEMORY.ok("leftovers", "none")
    remedy = "start any worker or endpoint on this host, which removes them, or remove them"
    return MEMORY.note("leftovers", f"killed processes left {', '.join(found)}", remedy)


def check_pinned(request: DoctorRequest, has_rdma: bool) -> Finding:
    """Check how much memory a process may pin."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = has_rdma and request.transports != ("shm",)
    return judge_pinned(limit_bytes, has_capability(Capability.IPC_LOCK), needed=needed)


def judge_pinned(limit_bytes: int, may_exceed: bool, *, needed: bool) -> Finding:
    """Judge the limit of pinned memory; RDMA pins all pools and staging slots."""
    name, shown = "pinned memory", f"at most {human_bytes(limit_bytes)} a process"
    if limit_bytes == UNLIMITED:
        return MEMORY.ok(name, "no limit")
    if may_exceed:
        return MEMORY.ok(name, f"{shown}, but this one may exceed it (CAP_IPC_LOCK)")
    if not needed:
        return MEMORY.ok(name, f"{shown}; only RDMA would need more")
    remedy = "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity"
    return MEMORY.problem(name, f"{shown}, and RDMA pins the pools", remedy)


def check_huge_pages(switch: Path = HUGE_PAGES) -> Finding:
    """Check the kernel's switch; staging slots ask for huge pages."""
    chosen = re.search(r"\[(\w+)\]", read_kernel_file(switch) or "")
    if chosen is None:
        return MEMORY.ok("huge pages", "this system has no switch for them")
    if chosen[1] == "never":
        detail = "switched off, so copies through staging slots are several percent slower"
        return MEMORY.note("huge pages", detail, f"echo madvise > {switch}")
    return MEMORY.ok("huge pages", f"{chosen[1]}: staging slots get them")


# ---------------------------------------------------------------- writes between processes


def check_cma() -> Finding:
    """Check that one process may write another's memory with one copy by the kernel (CMA).

    NIXL's UCX moves host memory between processes this way if it may. A child writes into this
    process, because Linux may allow the other direction to a parent only.
    """
    if sys.platform != "linux":
        return CMA.ok(CMA_NAME, "this system has no such call; shm does not need it")
    try:
        errors = try_cma()
    except ProbeFailed as error:
        return CMA.note(CMA_NAME, str(error))
    has_ptrace = has_capability(Capability.SYS_PTRACE)
    return judge_cma(errors, read_kernel_file(PTRACE_SCOPE), has_ptrace)


def try_cma() -> list[int]:
    """Let a child write this process's memory: as a stranger, then with permission if that fails.

    Returns the error number of each trial, 0 for success.
    """
    errors = [_cma_errno()]
    libc = ctypes.CDLL(None, use_errno=True)
    if errors[0] and not libc.prctl(PR_SET_PTRACER, ANYBODY, NOBODY, NOBODY, NOBODY):
        try:
            errors.append(_cma_errno())
        finally:
            libc.prctl(PR_SET_PTRACER, NOBODY, NOBODY, NOBODY, NOBODY)
    return errors


def _cma_errno() -> int:
    text = secrets.token_hex(16)
    buffer = ctypes.create_string_buffer(len(text) + 1)
    words = (str(os.getpid()), str(ctypes.addressof(buffer)), text)
    error: int = run_probe("cma", *words, limit_s=10.0)["errno"]
    if buffer.value != (b"" if error else text.encode()):
        raise ProbeFailed(f"a child wrote other bytes into this process than expected; {REPORT}")
    return error


def judge_cma(errors: list[int], scope: str | None, has_ptrace: bool) -> Finding:
    """Judge the trials for transports, and say how to allow such writes."""
    rights = f"ptrace_scope {scope or 'absent'}, {'has' if has_ptrace else 'no'} CAP_SYS_PTRACE"
    if not errors[0]:
        return CMA.ok(CMA_NAME, f"may write each other's memory ({rights})")
    if not errors[-1]:
        detail = f"may write the memory of one that permits it, as NIXL's UCX does ({rights})"
        return CMA.ok(CMA_NAME, detail)
    code = errno.errorcode.get(errors[0], "nothing written")
    slower = "NIXL moves host memory between processes over TCP, two to three times slower"
    container = "docker run --cap-add SYS_PTRACE (securityContext capabilities in Kubernetes)"
    remedies = {
        "2": f"sysctl kernel.yama.ptrace_scope=1, or {container}",
        "3": "ptrace_scope 3 holds until the next boot: set kernel.yama.ptrace_scope=1 there",
    }
    detail = f"may not write each other's memory ({code}; {rights}), so {slower}"
    remedy = remedies.get(scope or "", f"{container}, and one PID namespace for all ranks")
    return CMA.note(CMA_NAME, detail, remedy)


# ---------------------------------------------------------------- copies


def check_copy_loop(request: DoctorRequest) -> list[Finding]:
    """Compile or load the copy loop, and compare it with a plain copy."""
    try:
        # Compiling takes a few seconds, once.
        found = run_probe("copy", limit_s=60.0)
    except ProbeFailed as error:
        remedy = "reinstall numba: pip install --force-reinstall numba"
        return [COPIES.issue("loop", str(error), remedy, needed=request.on_host)]
    if not found["right"]:
        detail = "the compiled loop copies wrong bytes on this processor"
        return [COPIES.problem("loop", detail, REPORT)]
    speed = f"{found['loop_bytes_per_s'] / 1e9:.1f} GB/s in pieces of {PIECE_BYTES} bytes"
    ready = COPIES.ok("loop", f"ready in {human_seconds(found['ready_s'])}")
    return [ready, judge_copy_speed(speed, found["memcpy_ratio"])]


def judge_copy_speed(speed: str, memcpy_ratio: float) -> Finding:
    """Judge the loop's speed by that of a plain copy in the same run."""
    detail = f"{speed}, {memcpy_ratio:.2f} of a plain copy"
    if memcpy_ratio >= SLOW_COPY_RATIO:
        return COPIES.ok("speed", detail)
    remedy = "try again when the machine is idle; `kvferry bench transfer` measures more"
    return COPIES.note("speed", detail, remedy)
