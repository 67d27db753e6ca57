"""Which host this is, since it was started: what processes that share memory have in common."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def boot() -> str:
    """What tells this host, since it was started, from every other."""
    if sys.platform == "linux":
        with suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            asked = ["sysctl", "-n", "kern.bootsessionuuid"]
            told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5)
            return told.stdout.strip()
    return socket.gethostname()
