"""The right to write another process's memory with one copy by the kernel (CMA), really tried.

Between processes of one host, NIXL's UCX writes host memory this way if it may.
A child tries it on this process, because that is the harder direction: Linux
lets a parent do to its child what it denies to strangers, and ranks are
strangers to each other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.cli.doctor.checks.capabilities import Capability, has_capability
from kvferry.cli.doctor.checks.check import Check, lacking, ok
from kvferry.cli.doctor.checks.children import Children, ProbeFailed
from kvferry.cli.doctor.checks.machine import read

AREA = "one-copy writes"
NAME = "other processes"

SCOPE = "proc/sys/kernel/yama/ptrace_scope"
NUM_BYTES = 4096
LIMIT_S = 10.0
# prctl(2): who besides an ancestor may touch this process's memory.
PR_SET_PTRACER = 0x59616D61
ANYBODY, NOBODY = ctypes.c_ulong(-1), ctypes.c_ulong(0)

SLOWER = "so NIXL moves host memory between processes over TCP, two to three times slower"


class CmaTrial(NamedTuple):
    """Error numbers, 0 where it worked: by a stranger, and by one whom this process permits.

    ``permitted`` is None where permitting was not needed, or can't be done.
    """

    stranger: int
    permitted: int | None = None


def other_processes(root: Path = Path("/")) -> Iterator[Check]:
    """Whether one process may write another's memory here."""
    if sys.platform != "linux":
        yield ok(AREA, NAME, "this system has no such call; shm does not need it")
        return
    scope, may = read(root / SCOPE), has_capability(Capability.SYS_PTRACE, root)
    try:
        yield judge(attempt(), scope, may)
    except ProbeFailed as error:
        yield lacking(AREA, NAME, str(error), needed=False)


def attempt() -> CmaTrial:
    """Let a child write our memory, if need be with our permission."""
    stranger = _written()
    if not stranger:
        return CmaTrial(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PTRACER, ANYBODY, NOBODY, NOBODY, NOBODY):
        return CmaTrial(stranger)
    try:
        return CmaTrial(stranger, _written())
    finally:
        libc.prctl(PR_SET_PTRACER, NOBODY, NOBODY, NOBODY, NOBODY)


def _written() -> int:
    """The error number of a child that turns every bit of a buffer of ours."""
    before = os.urandom(NUM_BYTES)
    buffer = ctypes.create_string_buffer(before, NUM_BYTES)
    words = (str(os.getpid()), str(ctypes.addressof(buffer)), str(NUM_BYTES))
    with Children() as children:
        error: int = children.start("cma", *words, limit_s=LIMIT_S).answer()["errno"]
    turned = bytes(byte ^ 0xFF for byte in before)
    if buffer.raw != (before if error else turned):
        raise ProbeFailed("a child wrote other bytes into this process than it said; report it")
    return error


def judge(tried: CmaTrial, scope: str | None, may: bool) -> Check:
    """What it means for transports, and how to allow it."""
    rights = f"ptrace_scope {scope or 'absent'}, {'has' if may else 'no'} CAP_SYS_PTRACE"
    if not tried.stranger:
        return ok(AREA, NAME, f"may write each other's memory ({rights})")
    if tried.permitted == 0:
        told = f"may write the memory of one that permits it, as NIXL's UCX does ({rights})"
        return ok(AREA, NAME, told)
    code = errno.errorcode.get(tried.stranger, "nothing written")
    return lacking(
        AREA,
        NAME,
        f"may not write each other's memory ({code}; {rights}), {SLOWER}",
        needed=False,
        remedy=_remedy(scope),
    )


def _remedy(scope: str | None) -> str:
    container = "docker run --cap-add SYS_PTRACE (securityContext capabilities in Kubernetes)"
    if scope == "3":
        return "ptrace_scope 3 holds until the next boot: set kernel.yama.ptrace_scope=1 there"
    if scope == "2":
        return f"sysctl kernel.yama.ptrace_scope=1, or {container}"
    return f"{container}, and one PID namespace for all ranks of a host"
