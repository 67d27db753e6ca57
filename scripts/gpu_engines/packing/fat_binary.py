"""Prune a shared object's CUDA code to one GPU architecture.

A CUDA wheel holds the same kernels for many architectures, in containers of one entry each. Pruning
replaces the entries of other architectures by zeros, which compress away. Sizes and addresses in
the file stay as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Container as Members
from collections.abc import Iterator
from typing import NamedTuple

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2
# Magic, version, size of this header, size of the entries.
_CONTAINER = struct.Struct("<IHHQ")
# Kind, version, size of this header, size of the code, 12 bytes of other data, architecture.
_ENTRY = struct.Struct("<HHIQ12xI")
# Offset of a container's size in its header.
_SIZE_AT = 8


class FatEntry(NamedTuple):
    """The code of one architecture: ``arch`` is 90 for compute capability 9.0."""

    kind: int
    arch: int
    data: bytes


class FatContainer(NamedTuple):
    """The code of one translation unit. ``start`` and ``size`` locate the entries in the file."""

    header: int
    start: int
    size: int
    entries: tuple[FatEntry, ...]


def containers(data: bytes) -> Iterator[FatContainer]:
    """Yield the containers of a 64-bit ELF file, in order."""
    for begin, end in _sections(data):
        offset = begin
        while offset + _CONTAINER.size <= end:
            magic, _, header_size, size = _CONTAINER.unpack_from(data, offset)
            if magic != _MAGIC:
                offset += 8
                continue
            start = offset + header_size
            yield FatContainer(offset, start, size, tuple(_entries(data, start, start + size)))
            offset = start + size


def filler(data: bytes, arch: int) -> bytes:
    """Return the smallest machine code for another architecture, or nothing."""
    others = [
        entry.data
        for container in containers(data)
        for entry in container.entries
        if entry.kind == _MACHINE_CODE and entry.arch != arch
    ]
    return min(others, key=len, default=b"")


def pruned(
    data: bytes, arch: int, *, only: Members[int] | None = None, spare: bytes = b""
) -> bytes:
    """Return the file with the code of one architecture, in the containers numbered in ``only``.

    A container without code for the architecture keeps its newest PTX that the architecture can
    compile. The driver rejects an empty container, so one that would be empty keeps machine code
    of another architecture, or gets ``spare``.
    """
    kept = bytearray(data)
    for number, container in enumerate(containers(data)):
        wanted = _for_arch(container, arch) if only is None or number in only else []
        code = b"".join(entry.data for entry in wanted) or _foreign(container, arch) or spare
        if not code or len(code) > container.size:
            raise ValueError(
                f"container {number} would be empty; pass spare, the filler() of another file"
            )
        kept[container.start : container.start + container.size] = code.ljust(container.size, b"\0")
        struct.pack_into("<Q", kept, container.header + _SIZE_AT, len(code))
    return bytes(kept)


def _for_arch(container: FatContainer, arch: int) -> list[FatEntry]:
    own = [e for e in container.entries if e.kind == _MACHINE_CODE and e.arch == arch]
    return own or [e for e in container.entries if e.kind == _PTX and e.arch <= arch][-1:]


def _foreign(container: FatContainer, arch: int) -> bytes:
    others = [e.data for e in container.entries if e.kind == _MACHINE_CODE and e.arch != arch]
    return min(others, key=len, default=b"")


def _entries(data: bytes, start: int, end: int) -> Iterator[FatEntry]:
    while start < end:
        kind, _, header_size, size, arch = _ENTRY.unpack_from(data, start)
        stop = start + header_size + size
        if stop > end:
            raise ValueError(
                f"an entry at {start:#x} ends beyond its container; is the file whole?"
            )
        yield FatEntry(kind, arch, data[start:stop])
        start = stop


def _sections(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the sections with fat binaries."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    names = headers[names_index][4]
    for header in headers:
        at = names + header[0]
        if data[at : data.index(b"\0", at)].decode() in SECTIONS:
            yield header[4], header[4] + header[5]
