"""A small process that removes the shared memory its parent left behind.

It reads names from a pipe until the pipe closes, which happens however the parent ends, and then
unlinks every name that was not withdrawn. It runs in a session of its own and is nobody's child,
because an engine is often ended by killing its process group or all its descendants, and that
kills Python's own resource tracker too. This file runs as a script and imports nothing from
kvferry, so it starts quickly and uses little memory.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from contextlib import suppress


class CleanupProcess:
    """Handle of this process's cleanup process, which starts with the first name.

    A forked child starts with an empty list and gets a cleanup process of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._pipe = -1
        os.register_at_fork(after_in_child=self._reset)

    def add(self, name: str) -> None:
        """Have ``name`` unlinked when this process ends. Call before creating the segment."""
        with self._lock:
            self._names.add(name)
            try:
                os.write(self._pipe, f"+{name}\n".encode())
            except OSError:
                # Not started yet, or killed.
                self._start()
                os.write(self._pipe, "".join(f"+{each}\n" for each in self._names).encode())

    def discard(self, name: str) -> None:
        """Withdraw a name that has been unlinked."""
        with self._lock:
            self._names.discard(name)
            with suppress(OSError):  # If it was killed, the next one gets the current names.
                os.write(self._pipe, f"-{name}\n".encode())

    def _start(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        from multiprocessing.spawn import get_executable  # noqa: PLC0415 - not in the script

        python = os.fsdecode(get_executable())
        stdin, self._pipe = os.pipe()
        # Do not hold the parent's stdout and stderr open after the parent has ended.
        silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), *silence]
        arguments = [python, "-I", "-S", __file__]
        try:
            child = os.posix_spawn(python, arguments, os.environ, file_actions=actions, setsid=True)
            with suppress(ChildProcessError):  # If the program ignores SIGCHLD.
                os.waitpid(child, 0)
        finally:
            os.close(stdin)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._names = set()
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1


def main() -> None:
    """Read names from standard input until it closes, then unlink those that are left."""
    if os.fork():
        os._exit(0)
    # Close descriptors that libraries in the parent left inheritable: sockets, devices.
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
    main()
