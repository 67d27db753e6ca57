"""Pruning CUDA code in a shared object, on an ELF file made here."""

from __future__ import annotations

import struct

import pytest
from gpu_engines.packing.fat_binary import containers, filler, pruned

PTX, MACHINE_CODE = 1, 2
NAMES = b"\0.nv_fatbin\0.text\0"


def entry(kind: int, arch: int, code: bytes) -> bytes:
    return struct.pack("<HHIQ12xI", kind, 1, 32, len(code), arch) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(section: bytes) -> bytes:
    """Return a file with a section of names, one of text and one of fat binaries."""
    text = b"\xba\x55" * 8
    contents = [(NAMES, 0), (text, NAMES.index(b".text")), (section, NAMES.index(b".nv_fatbin"))]
    header = bytearray(64)
    table = 64 + sum(len(content) for content, _ in contents)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, len(contents), 0)
    data, offset, headers = bytes(header), 64, b""
    for content, name in contents:
        headers += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, len(content), 0, 0, 8, 0)
        data += content
        offset += len(content)
    return data + headers


HOPPER = entry(MACHINE_CODE, 90, b"hopper--" * 4)
AMPERE = entry(MACHINE_CODE, 80, b"ampere--")
BLACKWELL = entry(MACHINE_CODE, 100, b"blackwell-------")
OLD_PTX = entry(PTX, 80, b"ptx of 80-------")
NEW_PTX = entry(PTX, 120, b"ptx of 120------")


def kept(data: bytes) -> list[list[bytes]]:
    return [[each.data for each in found.entries] for found in containers(data)]


def test_code_of_one_architecture_is_kept() -> None:
    data = elf(container(AMPERE, HOPPER, BLACKWELL) + bytes(8) + container(HOPPER, OLD_PTX))
    done = pruned(data, 90)
    assert kept(done) == [[HOPPER], [HOPPER]]
    assert len(done) == len(data)
    assert b"ampere" not in done
    assert b"blackwell" not in done
    # Everything but the containers is as before.
    assert done[:100] == data[:100]
    assert done[-192:] == data[-192:]


def test_ptx_that_the_architecture_can_compile_stands_in() -> None:
    data = elf(container(AMPERE, OLD_PTX, NEW_PTX, BLACKWELL))
    assert kept(pruned(data, 90)) == [[OLD_PTX]]


def test_no_container_becomes_empty() -> None:
    """The driver rejects an empty one."""
    data = elf(container(BLACKWELL, AMPERE, NEW_PTX) + container(HOPPER, NEW_PTX))
    done = pruned(data, 90, only=range(1), spare=BLACKWELL)
    assert kept(done) == [[AMPERE], [BLACKWELL]]
    with pytest.raises(ValueError, match="container 1 would be empty; pass spare"):
        pruned(data, 90, only=range(1))


def test_filler_is_the_smallest_foreign_code() -> None:
    assert filler(elf(container(HOPPER, AMPERE, BLACKWELL)), 90) == AMPERE
    assert filler(elf(container(HOPPER, OLD_PTX)), 90) == b""


def test_a_cut_file_is_rejected() -> None:
    broken = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 40) + entry(MACHINE_CODE, 90, bytes(64))
    with pytest.raises(ValueError, match="ends beyond its container"):
        pruned(elf(broken), 90)
