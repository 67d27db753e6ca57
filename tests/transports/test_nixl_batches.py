"""Bindings cut into NIXL's batches: nothing lost, nothing mixed, nothing too long."""

from __future__ import annotations

import numpy as np

from kvferry.plan.coalesce import Stride
from kvferry.regions import HOST, Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, grid
from kvferry.transports.nixl.batches import DescriptorBatch, NixlMemory, batches

MIB = 1 << 20
GPU = Device("cuda", 3)


def rows(made: list[DescriptorBatch]) -> list[tuple[int, ...]]:
    """Every descriptor: source, target, length, and the two devices."""
    return [
        (int(ours[0]), int(theirs[0]), int(ours[1]), int(ours[2]), int(theirs[2]))
        for batch in made
        for ours, theirs in zip(batch.source, batch.target, strict=True)
    ]


def test_addresses_lengths_and_devices() -> None:
    source = NixlMemory([Region(1 << 40, 100), Region((1 << 47) + 7, 100, GPU)])
    target = NixlMemory([Region(5000, 100, GPU), Region(9000, 100)])
    made = batches(
        binding_of(
            [PlacedPiece(1, 2, 3, 0, 1), PlacedPiece(4, 5, 6, 1, 0), PlacedPiece(9, 9, 1, 0, 1)]
        ),
        source,
        target,
    )
    assert sorted(rows(made)) == [
        ((1 << 40) + 1, 9002, 3, 0, 0),
        ((1 << 40) + 9, 9009, 1, 0, 0),
        ((1 << 47) + 11, 5005, 6, 3, 3),
    ]
    kinds = {(batch.source_kind, batch.target_kind): len(batch.source) for batch in made}
    assert kinds == {("DRAM", "DRAM"): 2, ("VRAM", "VRAM"): 1}


def test_memory_of_different_kinds_is_never_in_one_batch() -> None:
    source = NixlMemory([Region(0, MIB), Region(MIB, MIB, GPU)])
    target = NixlMemory([Region(0, MIB, GPU), Region(MIB, MIB)])
    pieces = [PlacedPiece(8 * i, 8 * i, 8, i % 2, i // 2 % 2) for i in range(64)]
    made = batches(binding_of(pieces), source, target)
    assert sorted(len(batch.source) for batch in made) == [16] * 4
    assert len({(batch.source_kind, batch.target_kind) for batch in made}) == 4


def test_neighbours_are_merged_and_empty_pieces_left_out() -> None:
    memory = NixlMemory([Region(0, MIB)])
    together = grid(1, 512, Stride(512, 512))
    assert rows(batches(together, memory, memory)) == [(0, 0, 512, 0, 0)]
    assert batches(binding_of([PlacedPiece(5, 5, 0)]), memory, memory) == []
    assert batches(binding_of([]), memory, memory) == []


def test_many_pieces_and_many_bytes_are_cut() -> None:
    memory = NixlMemory([Region(0, 1 << 40, HOST)])
    small = grid(10_000, 512, Stride(1024, 2048))
    large = grid(64, 4 * MIB, Stride(8 * MIB, 8 * MIB))
    for binding, at_least, most in ((small, 5, 2100), (large, 8, 9)):
        made = batches(binding, memory, memory)
        named = binding.descriptors()
        expected = zip(named.source_offset, named.target_offset, named.length, strict=True)
        assert [row[:3] for row in rows(made)] == [tuple(map(int, row)) for row in expected]
        assert len(made) >= at_least
        assert max(len(batch.source) for batch in made) <= most


def test_tables_are_what_nixl_reads() -> None:
    memory = NixlMemory([Region(4096, MIB)])
    (batch,) = batches(binding_of([PlacedPiece(0, 8, 16)]), memory, memory)
    assert isinstance(batch.source, np.ndarray)
    assert batch.source.dtype == np.uint64
    assert batch.source.shape == (1, 3)
