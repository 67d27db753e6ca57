"""The short way for one piece agrees with the long way for many."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.regions import HOST, Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, grid
from kvferry.transports import bounds
from kvferry.transports.nixl.batches import NixlMemory, batch_of, batches
from kvferry.transports.single_descriptor import single

SMALL = st.integers(-3, 70)
SIZES = [64, 0, 32]


@given(st.builds(PlacedPiece, SMALL, SMALL, SMALL, st.integers(-1, 3), st.integers(-1, 3)))
def test_it_fits_where_there_is_no_problem(piece: PlacedPiece) -> None:
    binding = binding_of([piece])
    only = single(binding)
    assert only == (
        piece.source_region,
        piece.source_offset,
        piece.target_region,
        piece.target_offset,
        piece.length,
    )
    assert only.fits(SIZES, SIZES) == (bounds.problem(binding, SIZES, SIZES) is None)


def test_bases_count() -> None:
    bases = [Base(0, 1, 100)], [Base(0, 2, 200)]
    only = single(grid(1, 50, Stride(0, 0), *bases))
    assert only == (1, 100, 2, 200, 50)


def test_more_than_one_piece_is_not_single() -> None:
    many = [Base(0, 0, 0), Base(1, 0, 50)]
    assert single(grid(2, 5, Stride(10, 10))) is None
    assert single(grid(1, 5, Stride(10, 10), many, many)) is None
    assert single(binding_of([PlacedPiece(0, 0, 1), PlacedPiece(2, 2, 1)])) is None
    assert single(binding_of([])) is None


def test_its_batch_is_that_of_the_long_way() -> None:
    memory = NixlMemory([Region(4096, 64, HOST), Region(1 << 40, 64, Device("cuda", 5))])
    binding = binding_of([PlacedPiece(3, 4, 9, 1, 0)])
    only = single(binding)
    assert only is not None
    short, (long,) = batch_of(only, memory, memory), batches(binding, memory, memory)
    np.testing.assert_array_equal(short.source, long.source)
    np.testing.assert_array_equal(short.target, long.target)
    assert short[2:4] == long[2:4]
    assert (short.piece, long.piece) == (only, None)
