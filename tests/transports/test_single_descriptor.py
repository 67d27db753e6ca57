"""The fast path for one piece agrees with the path for many."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.regions import HOST, Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, grid
from kvferry.transports.bounds import RegionBounds, find_violation
from kvferry.transports.nixl.batches import NixlMemory, make_batches, single_batch
from kvferry.transports.single_descriptor import single_descriptor

SMALL = st.integers(-3, 70)
SIZES = [64, 0, 32]
SIZES_BOUNDS = RegionBounds(SIZES)


@given(st.builds(PlacedPiece, SMALL, SMALL, SMALL, st.integers(-1, 3), st.integers(-1, 3)))
def test_fits_agrees_with_the_bounds_check(piece: PlacedPiece) -> None:
    binding = binding_of([piece])
    only = single_descriptor(binding)
    assert only == (
        piece.source_region,
        piece.source_offset,
        piece.target_region,
        piece.target_offset,
        piece.length,
    )
    assert only.fits(SIZES, SIZES) == (find_violation(binding, SIZES_BOUNDS, SIZES_BOUNDS) is None)


def test_offsets_of_bases_are_added() -> None:
    bases = [Base(0, 1, 100)], [Base(0, 2, 200)]
    only = single_descriptor(grid(1, 50, Stride(0, 0), *bases))
    assert only == (1, 100, 2, 200, 50)


def test_several_pieces_have_no_single_descriptor_descriptor() -> None:
    many = [Base(0, 0, 0), Base(1, 0, 50)]
    assert single_descriptor(grid(2, 5, Stride(10, 10))) is None
    assert single_descriptor(grid(1, 5, Stride(10, 10), many, many)) is None
    assert single_descriptor(binding_of([PlacedPiece(0, 0, 1), PlacedPiece(2, 2, 1)])) is None
    assert single_descriptor(binding_of([])) is None


def test_its_batch_is_that_of_the_long_way() -> None:
    memory = NixlMemory([Region(4096, 64, HOST), Region(1 << 40, 64, Device("cuda", 5))])
    binding = binding_of([PlacedPiece(3, 4, 9, 1, 0)])
    only = single_descriptor(binding)
    assert only is not None
    short, (long,) = single_batch(only, memory, memory), make_batches(binding, memory, memory)
    np.testing.assert_array_equal(short.source, long.source)
    np.testing.assert_array_equal(short.target, long.target)
    assert short[2:4] == long[2:4]
    assert (short.single, long.single) == (only, None)
