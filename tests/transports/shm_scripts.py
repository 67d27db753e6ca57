"""Shared-memory transports for tests, and scripts that run one in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.errors import TransportError
from kvferry.regions import Region
from kvferry.testing.transports import copy_by_memmove
from kvferry.transports import segments
from kvferry.transports.base import Copy, TransportSetup
from kvferry.transports.shm import ShmTransport

PAGE = 4096
# The first lines of the scripts below.
PROLOGUE = """
    import os, signal, sys, time
    import msgspec
    from kvferry.regions import Region
    from kvferry.testing.transports import copy_by_memmove
    from kvferry.transports import segments
    from kvferry.transports.base import TransportSetup
    from kvferry.transports.shm import ShmTransport

    transport = ShmTransport(TransportSetup(agent="script", copy=copy_by_memmove))

    def registered(num_bytes):
        array = transport.allocate(num_bytes)
        transport.register([Region(array.ctypes.data, array.nbytes)], writable=True)
        return array

    def kill_cleanup():
        pipe = os.readlink(f"/proc/self/fd/{segments._cleanup._pipe}")
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            try:
                if pid != os.getpid() and os.readlink(f"/proc/{pid}/fd/0") == pipe:
                    os.kill(pid, signal.SIGKILL)
                    while os.path.exists(f"/proc/{pid}"):
                        time.sleep(0.001)
            except OSError:
                continue

    def name_of(transport):
        return msgspec.msgpack.decode(transport.metadata())["segments"][0]
"""


def make(copy: Copy = copy_by_memmove) -> ShmTransport:
    return ShmTransport(TransportSetup(agent="test", copy=copy))


def region_of(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def names_of(transport: ShmTransport) -> list[str]:
    return list(msgspec.msgpack.decode(transport.metadata())["segments"])


def script(body: str, prologue: str = PROLOGUE) -> str:
    return textwrap.dedent(prologue) + textwrap.dedent(body)


def run(body: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python process in which warnings are errors."""
    command = [*before, sys.executable, "-W", "error", "-c", script(body)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def exists(name: str) -> bool:
    try:
        segments.attach(name, 0).close()
    except TransportError:
        return False
    return True


def kill_tree(pid: int, number: int) -> None:
    """Kill every descendant and then the process, as engines do."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    doomed = [pid]
    for each in doomed:
        doomed += [child for child, parent in parents.items() if parent == each]
    for each in reversed(doomed):
        os.kill(each, number)


def await_gone(name: str) -> None:
    deadline = time.monotonic() + 20
    while exists(name):
        assert time.monotonic() < deadline, f"{name} was left behind"
        time.sleep(0.01)
