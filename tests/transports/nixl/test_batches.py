"""NIXL descriptors of bindings: complete, of one memory type per batch, and short enough."""

from __future__ import annotations

import numpy as np

from kvferry.plan.coalesce import Stride
from kvferry.regions import HOST, Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, grid
from kvferry.transports.nixl.batches import DescriptorBatch, NixlMemory, make_batches, small_batch

MIB = 1 << 20
GPU = Device("cuda", 3)


def rows(made: list[DescriptorBatch]) -> list[tuple[int, ...]]:
    """Return every descriptor: source, target, length, and the two devices."""
    return [
        (int(ours[0]), int(theirs[0]), int(ours[1]), int(ours[2]), int(theirs[2]))
        for batch in made
        for ours, theirs in zip(batch.source, batch.target, strict=True)
    ]


def test_addresses_lengths_and_devices() -> None:
    source = NixlMemory([Region(1 << 40, 100), Region((1 << 47) + 7, 100, GPU)])
    target = NixlMemory([Region(5000, 100, GPU), Region(9000, 100)])
    made = make_batches(
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
    types = {(batch.source_type, batch.target_type): len(batch.source) for batch in made}
    assert types == {("DRAM", "DRAM"): 2, ("VRAM", "VRAM"): 1}


def test_a_batch_has_one_type_of_memory() -> None:
    source = NixlMemory([Region(0, MIB), Region(MIB, MIB, GPU)])
    target = NixlMemory([Region(0, MIB, GPU), Region(MIB, MIB)])
    pieces = [PlacedPiece(8 * i, 8 * i, 8, i % 2, i // 2 % 2) for i in range(64)]
    made = make_batches(binding_of(pieces), source, target)
    assert sorted(len(batch.source) for batch in made) == [16] * 4
    assert len({(batch.source_type, batch.target_type) for batch in made}) == 4


def test_adjacent_pieces_are_merged_and_empty_ones_dropped() -> None:
    memory = NixlMemory([Region(0, MIB)])
    together = grid(1, 512, Stride(512, 512))
    assert rows(make_batches(together, memory, memory)) == [(0, 0, 512, 0, 0)]
    assert make_batches(binding_of([PlacedPiece(5, 5, 0)]), memory, memory) == []
    assert make_batches(binding_of([]), memory, memory) == []


def test_large_bindings_are_cut() -> None:
    memory = NixlMemory([Region(0, 1 << 40, HOST)])
    small = grid(10_000, 512, Stride(1024, 2048))
    large = grid(64, 4 * MIB, Stride(8 * MIB, 8 * MIB))
    for binding, at_least, most in ((small, 5, 2100), (large, 8, 9)):
        made = make_batches(binding, memory, memory)
        named = binding.descriptors()
        expected = zip(named.source_offset, named.target_offset, named.length, strict=True)
        assert [row[:3] for row in rows(made)] == [tuple(map(int, row)) for row in expected]
        assert len(made) >= at_least
        assert max(len(batch.source) for batch in made) <= most


def test_large_bindings_to_a_gpu_are_cut_by_descriptors() -> None:
    """A GPU copies on its own, so the size of the pieces does not matter."""
    memory = NixlMemory([Region(0, 1 << 40, GPU)])
    assert len(make_batches(grid(128, 16 * MIB, Stride(32 * MIB, 32 * MIB)), memory, memory)) == 1
    small = make_batches(grid(10_000, 512, Stride(1024, 2048)), memory, memory)
    assert len(rows(small)) == 10_000
    assert max(len(batch.source) for batch in small) <= 512


def test_tables_have_the_shape_that_nixl_expects() -> None:
    memory = NixlMemory([Region(4096, MIB)])
    (batch,) = make_batches(binding_of([PlacedPiece(0, 8, 16)]), memory, memory)
    assert isinstance(batch.source, np.ndarray)
    assert batch.source.dtype == np.uint64
    assert batch.source.shape == (1, 3)


def test_small_batch_agrees_with_make_batches() -> None:
    memory = NixlMemory([Region(4096, MIB), Region(1 << 40, MIB)])
    small = binding_of(
        [PlacedPiece(5, 8, 16, 0, 1), PlacedPiece(100, 50, 0), PlacedPiece(64, 7, 9)]
    )
    made = small_batch(small, memory, memory)
    assert made is not None
    assert sorted(rows(made)) == sorted(rows(make_batches(small, memory, memory)))


def test_small_batch_refuses_many_pieces_and_several_memory_types() -> None:
    memory = NixlMemory([Region(0, MIB), Region(MIB, MIB, GPU)])
    assert small_batch(grid(33, 512, Stride(1024, 2048)), memory, memory) is None
    mixed = binding_of([PlacedPiece(0, 0, 8), PlacedPiece(0, 0, 8, 1, 1)])
    assert small_batch(mixed, memory, memory) is None
