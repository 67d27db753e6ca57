"""Whether a peer's process is provably over.

A transport that sees a connection break knows only that: bytes that were under way
may still be taken by a peer that lives, from its own socket buffers, long after. If
the peer's memory is gone, nothing can land in it, and the write has ended. That can be
proved for a process of this host that this process can see; about any other nothing is
claimed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.events import Fate

# How long a peer whose connection broke is watched for the end of its process. Copies
# into a killed one fail a moment before the process has quite ended.
DOUBT_S = 0.5

_PROC = Path("/proc")
# Of the fields after the command's name in /proc/PID/stat, counted from 0 (proc(5)).
_START, _MEMORY = 19, 20


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One process: which boot of which host, which space of process ids, which one in it.

    ``boot`` is empty where there is no ``/proc``; then nothing is ever proved.
    """

    boot: Annotated[str, Meta(max_length=64)]
    space: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    start: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def own() -> Life:
    """The process that asks."""
    pid = os.getpid()
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = (_PROC / "self/ns/pid").stat().st_ino
        start = int(_fields(_PROC / str(pid) / "stat")[_START])
    except OSError:
        return Life("", 0, pid, 0)
    return Life(boot, space, pid, start)


def is_over(life: Life) -> bool | None:
    """Whether that process has no memory any more; None if that can't be told from here."""
    mine = own()
    if not life.boot or (life.boot, life.space) != (mine.boot, mine.space):
        return None
    try:
        os.kill(life.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # It is somebody else's, and there.
    try:
        if int(_fields(_PROC / str(life.pid) / "stat")[_START]) != life.start:
            return True
        return not any(map(_has_memory, (_PROC / str(life.pid) / "task").iterdir()))
    except OSError:
        return False  # It ends just now, or is hidden from us. The next look will tell, or none.


class Doubt:
    """A write whose connection broke: what is known of it, as soon as that is."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._until = time.monotonic() + DOUBT_S

    def fate(self) -> Fate | None:
        """FAILED if the peer's process is over, UNKNOWN if that does not show; None: wait."""
        over = is_over(self._life)
        if over:
            return Fate.FAILED
        if over is None or time.monotonic() >= self._until:
            return Fate.UNKNOWN
        return None


def _has_memory(task: Path) -> bool:
    """A dying thread lets go of the memory before it closes its files.

    So when a connection is reset because its process was killed, no thread has memory,
    though the process may not be a zombie yet. One thread alone proves nothing: the
    first may have ended while others go on.
    """
    return _fields(task / "stat")[_MEMORY] != "0"


def _fields(stat: Path) -> list[str]:
    """The fields after the command's name, which may itself have spaces and brackets."""
    return stat.read_text().rpartition(")")[2].split()
