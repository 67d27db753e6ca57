"""POSIX shared memory: named segments that are removed when their creator ends.

``multiprocessing.shared_memory`` makes the same system calls but does not fit here:

- Up to Python 3.12 it registers a name with the resource tracker even if the process only
  attached to it, so the end of a source would remove its target's memory.
- Spawned workers share the tracker with their parent, so the memory of a killed worker stays
  until the parent ends. If a whole process group is killed, the tracker is killed with it.
- It complains at exit about views that are still alive.

Here only the creator registers a segment, with a cleanup process of its own
(``cleanup_process``). Shared memory of an engine that already has a name can be used as well: it
gets a second name (``LinkedSegment``).

A creator holds a ``flock`` on each of its segments. The kernel drops it when the process ends,
however that happens and in whatever container. So an unlocked segment was left by a process that
was killed together with its cleanup process, and the next process that uses shared memory removes
it (``remove_leftovers``).
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import logging
import mmap
import os
import re
import secrets
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.transports.cleanup_process import CleanupProcess
from kvferry.transports.host_id import host_id

# Short enough for macOS, which allows 31 characters.
NAME_PATTERN = r"^/kvferry-[0-9a-f]{16}$"
# Linux 5.14 and later. Python has no constant for it.
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP_BYTES = 4 << 20
# Only this user may open a segment.
_MODE = 0o600
# Where Linux shows segments as files.
_FOLDER = "/dev/shm"
_DELETED = " (deleted)"

log = logging.getLogger("kvferry.transports")

_posixshmem = importlib.import_module("_posixshmem")  # The type checker has no stubs for it.
_cleanup = CleanupProcess()


class MappedSegment:
    """A segment mapped into this process. It stays mapped while anything views it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        # An empty mapping is not possible.
        self._map = mmap.mmap(descriptor, max(1, num_bytes))
        self.num_bytes = num_bytes
        self.address = self.array.ctypes.data

    @property
    def array(self) -> NDArray[np.uint8]:
        """A view of the whole segment."""
        return np.frombuffer(self._map, dtype=np.uint8, count=self.num_bytes)

    def populate(self, most_bytes: int) -> int:
        """Map the first pages now instead of on their first write; return how many bytes.

        Returns 0 if the kernel does not support it or memory is short.
        """
        end = min(self.num_bytes, most_bytes)
        try:
            # In steps, because madvise holds the GIL.
            for start in range(0, end, _POPULATE_STEP_BYTES):
                size = min(_POPULATE_STEP_BYTES, end - start)
                self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        except (AttributeError, OSError):
            return 0
        return end

    def close(self) -> None:
        """Unmap the segment, or leave that to the last view."""
        with suppress(BufferError):
            self._map.close()


class Segment:
    """Shared memory created by this process, under a name that peers can map."""

    def __init__(self, num_bytes: int) -> None:
        self.name, descriptor = _create()
        self._unlink = weakref.finalize(self, _unlink, self.name, descriptor, os.getpid())
        try:
            _reserve(descriptor, max(1, num_bytes))
            self.mapping = MappedSegment(descriptor, num_bytes)
            self.address, self.num_bytes = self.mapping.address, num_bytes
        except (OSError, ValueError, OverflowError) as error:
            self._unlink()
            raise TransportError(_explain(num_bytes, error)) from error

    def close(self) -> None:
        """Unlink and unmap it. Peers that have it mapped keep the memory."""
        self._unlink()
        self.mapping.close()


class SharedFile(NamedTuple):
    """A file in /dev/shm that is mapped at ``start``, from its byte ``offset`` on."""

    start: int
    length: int
    offset: int
    path: str


class LinkedSegment:
    """Shared memory that another library created, under a second name."""

    def __init__(self, file: SharedFile) -> None:
        self.name = _new_name()
        self.address, self.num_bytes = file.start - file.offset, file.offset + file.length
        descriptor = None
        try:
            descriptor = os.open(file.path, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _cleanup.add(self.name)
            os.link(file.path, f"{_FOLDER}{self.name}")
        except OSError as error:
            _unlink(self.name, descriptor, os.getpid())
            raise TransportError(
                f"the pool's shared memory {file.path} cannot be linked ({error.strerror}); "
                f"allocate the pool with the transport's allocate()"
            ) from error
        self._unlink = weakref.finalize(self, _unlink, self.name, descriptor, os.getpid())

    def close(self) -> None:
        """Remove the second name. The memory belongs to its creator."""
        self._unlink()


def attach(name: str, num_bytes: int) -> MappedSegment:
    """Map the first ``num_bytes`` of a peer's segment."""
    try:
        descriptor = _posixshmem.shm_open(name, os.O_RDWR, mode=_MODE)
    except PermissionError as error:
        raise TransportError(
            "the peer's shared memory belongs to another user; run both endpoints as one user"
        ) from error
    except OSError as error:
        raise TransportError(
            f"the peer's shared memory {name} cannot be opened ({error.strerror}); the peer has "
            f"ended, or does not share /dev/shm with this process (docker run --ipc)"
        ) from error
    try:
        # Touching memory beyond the end would raise SIGBUS.
        if os.fstat(descriptor).st_size < num_bytes:
            raise TransportError(
                f"the peer's shared memory {name} is shorter than its metadata says; restart it"
            )
        return MappedSegment(descriptor, num_bytes)
    except OSError as error:
        raise TransportError(
            f"the peer's shared memory {name} cannot be mapped ({error.strerror}); "
            f"check this process's memory limits (ulimit -v)"
        ) from error
    finally:
        os.close(descriptor)


def problem() -> str | None:
    """Return why shared memory is not usable on this machine; None if it is."""
    try:
        Segment(1).close()
    except TransportError as error:
        return str(error)
    return None


@cache
def space() -> str:
    """Return an id of the segments that this process can open: a host and its /dev/shm.

    Containers have a /dev/shm of their own unless they were started to share one. Its device
    number tells them apart, whatever other namespaces they share.
    """
    name, descriptor = _create()
    try:
        return f"{host_id()}:{os.fstat(descriptor).st_dev}"
    finally:
        _unlink(name, descriptor, os.getpid())


def capacity_problem(num_bytes: int) -> str | None:
    """Return why so much shared memory is not available now; None if it is."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    return None if num_bytes <= free else _explain(num_bytes, OSError(errno.ENOSPC, ""))


# ---------------------------------------------------------------- memory of other libraries


def link(address: int, num_bytes: int) -> LinkedSegment | None:
    """Make this memory a segment; None if it is not in a file of /dev/shm."""
    file = find_shared_file(address, num_bytes)
    return LinkedSegment(file) if file else None


def remove_at_exit(address: int, num_bytes: int) -> None:
    """Have the file under this memory removed when this process ends."""
    file = find_shared_file(address, num_bytes)
    if file:
        _cleanup.add(file.path.removeprefix(_FOLDER))


def find_shared_file(address: int, num_bytes: int) -> SharedFile | None:
    """Return the file of /dev/shm that this memory is mapped from, if any."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return None
    for file in shared_files(lines):
        if file.start <= address and address + num_bytes <= file.start + file.length:
            return file
    return None


def shared_files(lines: list[str]) -> list[SharedFile]:
    """Return the files of /dev/shm in the lines of ``/proc/self/maps``.

    The kernel may list one file in several pieces, for example with huge pages. Pieces that
    continue each other, both in memory and in the file, are joined.
    """
    found: list[SharedFile] = []
    for line in lines:
        span, rights, offset, _, _, *path = line.split(maxsplit=5)
        if not _is_named("".join(path), rights):
            continue
        start, end = (int(word, 16) for word in span.split("-"))
        file = SharedFile(start, end - start, int(offset, 16), path[0])
        last = found[-1] if found else None
        if last and file == _continuation(last, file.length):
            found.pop()
            file = last._replace(length=last.length + file.length)
        found.append(file)
    return found


def _continuation(last: SharedFile, length: int) -> SharedFile:
    return SharedFile(last.start + last.length, length, last.offset + last.length, last.path)


def _is_named(path: str, rights: str) -> bool:
    return rights.endswith("s") and path.startswith(f"{_FOLDER}/") and not path.endswith(_DELETED)


# ---------------------------------------------------------------- creating and unlinking


def _new_name() -> str:
    return f"/kvferry-{secrets.token_hex(8)}"


def _create() -> tuple[str, int]:
    """Create an empty segment; return its name and an open descriptor that holds its lock."""
    while True:
        name, descriptor = _new_name(), None
        try:
            # Before the segment exists, so that a kill at any moment leaves nothing behind.
            _cleanup.add(name)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
            descriptor = _posixshmem.shm_open(name, flags, mode=_MODE)
            if _lock_new(descriptor):
                return name, descriptor
            _unlink(name, descriptor, os.getpid())
        except OSError as error:
            _unlink(name, descriptor, os.getpid())
            raise TransportError(
                f"this machine has no usable POSIX shared memory ({error.strerror}); "
                f"on Linux, mount a tmpfs at /dev/shm that this user can write to"
            ) from error


def _lock_new(descriptor: int) -> bool:
    """Lock a new segment; False if another process is removing it as a leftover."""
    if sys.platform != "linux":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _unlink(name: str, descriptor: int | None, creator: int) -> None:
    # A forked child has copies of the parent's objects, but the memory is the parent's.
    if os.getpid() != creator:
        return
    with suppress(OSError):
        _posixshmem.shm_unlink(name)
    with suppress(OSError):
        _cleanup.discard(name)
    if descriptor is not None:
        os.close(descriptor)


def _reserve(descriptor: int, num_bytes: int) -> None:
    os.ftruncate(descriptor, num_bytes)
    if sys.platform == "linux":
        # Without this, a full /dev/shm would raise SIGBUS on the first touch.
        os.posix_fallocate(descriptor, 0, num_bytes)


def _explain(num_bytes: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
        return (
            f"shared memory has no room for {num_bytes} bytes; enlarge /dev/shm "
            f"(docker run --shm-size, or an emptyDir of medium Memory) or make the pools smaller"
        )
    return f"cannot allocate {num_bytes} bytes of shared memory ({error}); choose another size"


# ---------------------------------------------------------------- leftovers of killed processes


def leftovers(folder: Path = Path(_FOLDER)) -> list[Path]:
    """Return this user's segments whose creators have ended."""
    found = []
    for path in _segment_files(folder):
        with _locked_leftover(path) as is_leftover:
            if is_leftover:
                found.append(path)
    return found


@cache
def remove_leftovers() -> None:
    """Remove the segments of processes that have ended, once per process."""
    for path in _segment_files(Path(_FOLDER)):
        with _locked_leftover(path) as is_leftover, suppress(OSError):
            if is_leftover:
                path.unlink()
                log.info("leftover-removed path=%s", path)


def _segment_files(folder: Path) -> Iterator[Path]:
    # Empty on systems where segments are not files.
    for path in folder.glob("kvferry-*"):
        if re.match(NAME_PATTERN, f"/{path.name}"):
            yield path


@contextmanager
def _locked_leftover(path: Path) -> Iterator[bool]:
    """Hold the lock of a segment; yield False if another process holds it or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # Removed just now, or another user's.
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
