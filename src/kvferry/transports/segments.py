"""POSIX shared memory: named segments that are mapped, and that go when their maker goes.

The standard library's ``SharedMemory`` makes the same calls, but is not used here.
Up to Python 3.12 it registers a name also where it is only attached, so that the
end of a source would take away its target's memory. It registers with a resource
tracker that spawned workers share with their parent, so that the memory of a killed
worker stays until the parent ends, and that dies with them where a whole process group
is killed. And it complains at exit about views that are still alive. Here only the maker
tells of its segments, to a ``sweeper`` of its own.

An engine's own memory can be had as a segment too, if it is shared memory under a name
already (``linked``): it gets a second name, of ours.

A maker holds a lock (``flock``) on each of its segments, which the kernel drops with the
process, whatever ended it and whatever container it was in. So a segment without a lock is left
over from a process that was killed together with its sweeper, and the next process to use
shared memory removes it (``remove_leftovers``).
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
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.transports.host_id import boot
from kvferry.transports.sweeper import Sweeper

# Short enough for macOS, which allows 31 characters.
NAME_PATTERN = r"^/kvferry-[0-9a-f]{16}$"
# Linux 5.14 and later; Python has no name for it.
_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 4 << 20
# Memory is for this user alone.
_MODE = 0o600

# Where Linux shows segments as files.
_FOLDER = "/dev/shm"
_DELETED = " (deleted)"

log = logging.getLogger("kvferry.transports")

_posixshmem = importlib.import_module("_posixshmem")  # The type checker has no stubs for it.
_sweeper = Sweeper()


class Mapping:
    """A segment in this process's memory. It stays mapped while anything views it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        # A mapping can't be empty.
        self._map = mmap.mmap(descriptor, max(1, num_bytes))
        self.num_bytes = num_bytes
        self.address = self.array.ctypes.data

    @property
    def array(self) -> NDArray[np.uint8]:
        """A view of all of it."""
        return np.frombuffer(self._map, dtype=np.uint8, count=self.num_bytes)

    def touch(self, most_bytes: int) -> int:
        """Have the kernel map the first pages now, not one by one as they are written.

        How many bytes that were: none where the kernel can't, or where memory is short.
        """
        end = min(self.num_bytes, most_bytes)
        try:
            # In steps, because Python's other threads wait meanwhile.
            for start in range(0, end, _STEP_BYTES):
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_STEP_BYTES, end - start))
        except (AttributeError, OSError):
            return 0
        return end

    def close(self) -> None:
        """Unmap it, or let the last view do that."""
        with suppress(BufferError):
            self._map.close()


class NamedMemory(Protocol):
    """Memory under a name by which others can map it."""

    name: str
    # Where in our memory what the name stands for begins, and how long it is.
    address: int
    num_bytes: int

    def close(self) -> None:
        """Take the name away. Who has it mapped keeps it."""


class Segment:
    """Memory that we made, under a name by which others can map it."""

    def __init__(self, num_bytes: int) -> None:
        self.name, descriptor = _create()
        self._remove = weakref.finalize(self, _remove, self.name, descriptor, os.getpid())
        try:
            _size(descriptor, max(1, num_bytes))
            self.mapping = Mapping(descriptor, num_bytes)
            self.address, self.num_bytes = self.mapping.address, num_bytes
        except (OSError, ValueError, OverflowError) as error:
            self._remove()
            raise TransportError(_refusal(num_bytes, error)) from error

    def close(self) -> None:
        """Take the name away and unmap. Who has it mapped keeps it."""
        self._remove()
        self.mapping.close()


class Linked:
    """Shared memory that somebody else made, under a second name, of ours."""

    def __init__(self, mapped: Mapped) -> None:
        self.name = _new_name()
        self.address, self.num_bytes = mapped.start - mapped.offset, mapped.offset + mapped.length
        descriptor = None
        try:
            descriptor = os.open(mapped.path, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _sweeper.add(self.name)
            os.link(mapped.path, f"{_FOLDER}{self.name}")
        except OSError as error:
            _remove(self.name, descriptor, os.getpid())
            raise TransportError(
                f"the pool's shared memory {mapped.path} can't be named ({error.strerror}); "
                f"make the pool with the transport's allocate()"
            ) from error
        self._remove = weakref.finalize(self, _remove, self.name, descriptor, os.getpid())

    def close(self) -> None:
        """Take our name away. The memory is its maker's."""
        self._remove()


class Mapped(NamedTuple):
    """A file that is mapped in this process: where, from which of its bytes on, how much."""

    start: int
    length: int
    offset: int
    path: str


def linked(address: int, num_bytes: int) -> Linked | None:
    """This memory as a segment, if it is shared memory that has a name; else None."""
    mapped = find_shared(address, num_bytes)
    return Linked(mapped) if mapped else None


def sweep_with_us(address: int, num_bytes: int) -> None:
    """Have the name of this memory removed when this process is gone, whoever made it."""
    mapped = find_shared(address, num_bytes)
    if mapped:
        _sweeper.add(mapped.path.removeprefix(_FOLDER))


def find_shared(address: int, num_bytes: int) -> Mapped | None:
    """The shared, named segment that these bytes of this process lie in, if any."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return None
    return find_mapped(lines, address, num_bytes)


def find_mapped(lines: list[str], address: int, num_bytes: int) -> Mapped | None:
    """The shared, named segment that these bytes lie in, among the lines of ``/proc/self/maps``."""
    for mapped in _joined(lines):
        if mapped.start <= address and address + num_bytes <= mapped.start + mapped.length:
            return mapped
    return None


def _joined(lines: list[str]) -> list[Mapped]:
    """NamedMemory segments; one that the kernel cut into several, such as for hugepages, is one."""
    found: list[Mapped] = []
    for line in lines:
        span, rights, offset, _, _, *path = line.split(maxsplit=5)
        if not _is_named("".join(path), rights):
            continue
        start, end = (int(word, 16) for word in span.split("-"))
        part = Mapped(start, end - start, int(offset, 16), path[0])
        last = found[-1] if found else None
        if last and part == _next_to(last, part.length):
            part = Mapped(last.start, last.length + part.length, last.offset, last.path)
            found.pop()
        found.append(part)
    return found


def _next_to(last: Mapped, length: int) -> Mapped:
    """What would follow it both in memory and in its file."""
    return Mapped(last.start + last.length, length, last.offset + last.length, last.path)


def _is_named(path: str, rights: str) -> bool:
    return rights.endswith("s") and path.startswith(f"{_FOLDER}/") and not path.endswith(_DELETED)


def attach(name: str, num_bytes: int) -> Mapping:
    """Map the beginning of somebody else's segment."""
    try:
        descriptor = _posixshmem.shm_open(name, os.O_RDWR, mode=_MODE)
    except PermissionError as error:
        raise TransportError(
            "the peer's shared memory belongs to another user; run both endpoints as one"
        ) from error
    except OSError as error:
        raise TransportError(
            f"the peer's shared memory {name} can't be opened ({error.strerror}); "
            f"it has ended, or sees another shared memory than this process"
        ) from error
    try:
        # Bytes beyond the end would kill us with SIGBUS when touched.
        if os.fstat(descriptor).st_size < num_bytes:
            raise TransportError(f"the peer's shared memory {name} is shorter than it says")
        return Mapping(descriptor, num_bytes)
    except OSError as error:
        raise TransportError(
            f"the peer's shared memory {name} can't be mapped ({error.strerror})"
        ) from error
    finally:
        os.close(descriptor)


def problem() -> str | None:
    """Why no shared memory can be had on this machine; None if it can."""
    try:
        Segment(1).close()
    except TransportError as error:
        return str(error)
    return None


@cache
def space() -> str:
    """The name space of segments that this process sees: one host, one file system of them.

    Containers have a file system of their own for segments unless they were made to
    share it, and its device number tells them apart whatever their other name spaces are.
    """
    name, descriptor = _create()
    try:
        return f"{boot()}:{os.fstat(descriptor).st_dev}"
    finally:
        _remove(name, descriptor, os.getpid())


def room_problem(num_bytes: int) -> str | None:
    """Why so much shared memory can't be had now; None if there is room."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return None
    free = found.f_bavail * found.f_frsize
    return None if num_bytes <= free else _refusal(num_bytes, OSError(errno.ENOSPC, ""))


def _new_name() -> str:
    return f"/kvferry-{secrets.token_hex(8)}"


def _create() -> tuple[str, int]:
    """A new empty segment: its name and an open descriptor that holds its lock."""
    while True:
        name, descriptor = _new_name(), None
        try:
            # First, so that there is no moment at which our death would leave it behind.
            _sweeper.add(name)
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
            descriptor = _posixshmem.shm_open(name, flags, mode=_MODE)
            if _lock_new(descriptor):
                return name, descriptor
            _remove(name, descriptor, os.getpid())
        except OSError as error:
            _remove(name, descriptor, os.getpid())
            raise TransportError(
                f"this machine has no usable POSIX shared memory ({error.strerror}); "
                f"on Linux, mount a tmpfs at /dev/shm that this user can write to"
            ) from error


def _lock_new(descriptor: int) -> bool:
    """Lock a segment, unless somebody who removes leftovers came between."""
    if sys.platform != "linux":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _remove(name: str, descriptor: int | None, maker: int) -> None:
    """Take a name away and let go of its lock."""
    # A forked child has a copy of our objects, but nothing to say about our memory.
    if os.getpid() != maker:
        return
    with suppress(OSError):
        _posixshmem.shm_unlink(name)
    with suppress(OSError):
        _sweeper.discard(name)
    if descriptor is not None:
        os.close(descriptor)


# ---------------------------------------------------------------- what killed processes left


def leftovers(folder: Path = Path(_FOLDER)) -> list[Path]:
    """Segments of this user whose makers are gone."""
    found = []
    for path in _our_segments(folder):
        with _unused(path) as is_unused:
            if is_unused:
                found.append(path)
    return found


@cache
def remove_leftovers() -> None:
    """Remove them, once for each process."""
    for path in _our_segments(Path(_FOLDER)):
        with _unused(path) as is_unused, suppress(OSError):
            if is_unused:
                path.unlink()
                log.info("leftover-removed path=%s", path)


def _our_segments(folder: Path) -> Iterator[Path]:
    # Where segments are no files, none is found.
    for path in folder.glob("kvferry-*"):
        if re.match(NAME_PATTERN, f"/{path.name}"):
            yield path


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether nobody holds a segment's lock; nobody can take it while this lasts."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # It has just gone, or is another user's.
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _size(descriptor: int, num_bytes: int) -> None:
    os.ftruncate(descriptor, num_bytes)
    if sys.platform == "linux":
        # Take the memory now: where it is short, the first touch would be SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)


def _refusal(num_bytes: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
        return (
            f"shared memory has no room for {num_bytes} bytes; enlarge /dev/shm "
            f"(docker run --shm-size, or an emptyDir of medium Memory) or make the pools smaller"
        )
    return f"shared memory of {num_bytes} bytes can't be had ({error}); ask for another size"
