"""Temporary folders of a worker's ranks, and those that killed workers left behind.

A worker marks each of its folders with a file that it holds a lock on (``flock``). The kernel
drops the lock with the process, so a marked folder that nobody holds belongs to a worker that
was killed, and the next worker on the host removes it.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "kvferry-ranks-"
MARK = "in-use-by-kvferry"


class RanksFolder:
    """Where the ranks of one worker meet; only this user can reach it."""

    def __init__(self) -> None:
        remove_leftovers()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._mark: int | None = _mark(self.path)
        _mark_fork_server()

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._folder.cleanup()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None


@cache
def _mark_fork_server() -> None:
    """Mark where this process keeps its fork server's socket, for as long as it lives.

    A child of multiprocessing has its parent's folder, which is not its own to mark.
    """
    if multiprocessing.parent_process() is None:
        _mark(Path(util.get_temp_dir()))


def leftovers() -> list[Path]:
    """Folders of this user whose workers are gone."""
    return [folder for folder in _marked() if not _is_held(folder / MARK)]


def remove_leftovers() -> None:
    """Remove them."""
    for folder in leftovers():
        shutil.rmtree(folder, ignore_errors=True)
        log.info("leftover-removed path=%s", folder)


def _marked() -> Iterator[Path]:
    for pattern in (f"{PREFIX}*", "pymp-*"):
        for folder in Path(tempfile.gettempdir()).glob(pattern):
            with suppress(OSError):
                if (folder / MARK).is_file():
                    yield folder


def _mark(folder: Path) -> int:
    """Hold a lock in a folder. The mark appears with its lock already taken."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    Path(name).rename(folder / MARK)
    return descriptor


def _is_held(mark: Path) -> bool:
    try:
        with mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Held, another user's, or just gone.
        return True
    return False
