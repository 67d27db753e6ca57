"""Identity of this host since its last boot, for processes that share memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def host_id() -> str:
    """Return an id that differs between hosts and between boots of one host."""
    if sys.platform == "linux":
        with suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.check_output(command, text=True, timeout=5).strip()
    return socket.gethostname()
