"""The sweeper: a small process that removes the shared memory that its maker left behind.

It reads names until its maker is gone, however that came about, and takes away those that were
not taken back. It is in a session of its own and nobody's child, because whoever ends an engine
often kills its whole process group, or all its descendants, and Python's own resource tracker
with them. This file is run by its path: it imports nothing of ours, so it starts at once and
holds little.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from contextlib import suppress


class Sweeper:
    """One for the process, started when the first name is told; a forked child gets another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._pipe = -1
        os.register_at_fork(after_in_child=self._forget)

    def add(self, name: str) -> None:
        """Take this name away when this process is gone. Tell it before it is made."""
        with self._lock:
            self._names.add(name)
            try:
                os.write(self._pipe, f"+{name}\n".encode())
            except OSError:
                # There is none yet, or somebody has ended it.
                self._start()
                os.write(self._pipe, "".join(f"+{each}\n" for each in self._names).encode())

    def discard(self, name: str) -> None:
        """This name is gone."""
        with self._lock:
            self._names.discard(name)
            with suppress(OSError):  # Then the next is told what there is.
                os.write(self._pipe, f"-{name}\n".encode())

    def _start(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        from multiprocessing.spawn import get_executable  # noqa: PLC0415 - not in the sweeper

        python = os.fsdecode(get_executable())
        theirs, self._pipe = os.pipe()
        # Who waits for the end of our output must not wait for the sweeper's.
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        actions = [(os.POSIX_SPAWN_DUP2, theirs, 0), *quiet]
        arguments = [python, "-I", "-S", __file__]
        try:
            child = os.posix_spawn(python, arguments, os.environ, file_actions=actions, setsid=True)
            with suppress(ChildProcessError):  # Where the program lets the kernel reap.
                os.waitpid(child, 0)
        finally:
            os.close(theirs)

    def _forget(self) -> None:
        """What the parent made is not ours, and neither is who removes it."""
        self._lock = threading.Lock()
        self._names = set()
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1


def sweep() -> None:
    """Read names from the standard input to its end, and remove those that were left."""
    if os.fork():
        os._exit(0)
    # Libraries leave descriptors open to whatever a process starts: sockets, devices.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    names: set[str] = set()
    for line in sys.stdin:
        (names.add if line[0] == "+" else names.discard)(line[1:].rstrip("\n"))
    for name in names:
        with suppress(OSError):
            importlib.import_module("_posixshmem").shm_unlink(name)


if __name__ == "__main__":
    sweep()
