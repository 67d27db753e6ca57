"""Duplicates file descriptors of another process, without its cooperation.

The other process does not take part, so a stopped process delays nobody. Needs Linux 5.6.
The kernel demands the rights of a debugger: the same user, and a permissive ``ptrace_scope``.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvferry.errors import TransportError

# The same number on every architecture. Python has no function for it.
_SYS_PIDFD_GETFD = 438


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot. With its PID this identifies it."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[19])


class PidFd:
    """An open handle of another process (``pidfd_open``)."""

    def __init__(self, pid: int, began: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError, OverflowError) as error:
            raise TransportError(
                f"cannot find the peer's process {pid} ({error}); it has ended, or is in "
                f"another PID namespace than this one (docker run --pid)"
            ) from error
        try:
            # While the pidfd is open, the PID cannot be reused unnoticed.
            if start_ticks(pid) != began:
                raise TransportError(f"the peer's process {pid} has ended; connect again")
        except (OSError, TransportError) as error:
            os.close(self._pidfd)
            raise TransportError(f"the peer's process {pid} has ended; connect again") from error

    def fetch(self, descriptor: int) -> int:
        """Return a duplicate, in this process, of the other process's ``descriptor``."""
        libc = ctypes.CDLL(None, use_errno=True)
        fetched: int = libc.syscall(_SYS_PIDFD_GETFD, self._pidfd, descriptor, 0)
        if fetched >= 0:
            return fetched
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if isinstance(error, PermissionError):
            raise TransportError(
                "this process may not take file descriptors from the peer's; run both as one "
                "user with kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE, or let torch make the "
                "pools without expandable segments (PYTORCH_CUDA_ALLOC_CONF)"
            )
        raise TransportError(
            f"the peer has no file descriptor {descriptor} ({error.strerror}); connect again"
        )

    def __enter__(self) -> PidFd:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._pidfd)
