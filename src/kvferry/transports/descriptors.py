"""File descriptors of another process, taken without its help.

The other process need not be listening, nor even running: a stopped one holds nobody up.
Linux 5.6 or later. The kernel asks of us what it asks of a debugger: the same user, and
no rule against it (Yama's ``ptrace_scope``).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

from kvferry.errors import TransportError

# Its number is the same on every architecture; Python has no name for the call.
_PIDFD_GETFD = 438


def started(pid: int) -> int:
    """When a process began, in ticks since the host did: with its number, its identity."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[19])


class DescriptorHolder:
    """A process that has descriptors for us."""

    def __init__(self, pid: int, began: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError, OverflowError) as error:
            raise TransportError(
                f"the peer's process {pid} can't be found here ({error}); it has ended, or has "
                f"another PID name space than this one (docker run --pid)"
            ) from error
        try:
            # Only now, as from here on its number can't become another's unseen.
            if started(pid) != began:
                raise TransportError(f"the peer's process {pid} has ended")
        except (OSError, TransportError) as error:
            os.close(self._pidfd)
            raise TransportError(f"the peer's process {pid} has ended") from error

    def fetch(self, descriptor: int) -> int:
        """A descriptor of our own for what the other process has open under that number."""
        libc = ctypes.CDLL(None, use_errno=True)
        fetched: int = libc.syscall(_PIDFD_GETFD, self._pidfd, descriptor, 0)
        if fetched >= 0:
            return fetched
        code = ctypes.get_errno()
        if isinstance(_error(code), PermissionError):
            raise TransportError(
                "this process may not take file descriptors from the peer's; run both as one "
                "user with kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE, or let torch make the "
                "pools without expandable segments (PYTORCH_CUDA_ALLOC_CONF)"
            )
        raise TransportError(
            f"the peer has no file descriptor {descriptor} for us ({os.strerror(code)})"
        )

    def __enter__(self) -> DescriptorHolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._pidfd)


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
