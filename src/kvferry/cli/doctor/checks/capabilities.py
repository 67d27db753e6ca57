"""Linux's capabilities, and which of them this process has."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

from kvferry.cli.doctor.checks.machine import read


class Capability(IntEnum):
    """By its number (capabilities(7))."""

    IPC_LOCK = 14
    SYS_PTRACE = 19


def has_capability(which: Capability, root: Path = Path("/")) -> bool:
    """Whether it is in effect. Where there are none, nobody has any."""
    mask = re.search(r"^CapEff:\s*([0-9a-f]+)$", read(root / "proc/self/status") or "", re.M)
    return mask is not None and bool(int(mask[1], 16) >> which & 1)
