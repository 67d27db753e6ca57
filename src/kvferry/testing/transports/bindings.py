"""Bindings and bytes for tests of transports, and the memory that a write must leave behind."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base, Int64s

Bytes = NDArray[np.uint8]
NO_STRIDE = Stride(0, 0)


class PlacedPiece(NamedTuple):
    """One contiguous piece: where it is read and where it is written."""

    source_offset: int
    target_offset: int
    length: int
    source_region: int = 0
    target_region: int = 0


def binding_of(pieces: Iterable[PlacedPiece]) -> Binding:
    """Return a binding of these pieces, which may lie outside of their regions."""
    return Binding(
        tuple(
            BindingPart(
                "raw",
                f"piece{index}",
                (Base(0, piece.source_region, 0),),
                (Base(0, piece.target_region, 0),),
                _rows(piece.source_offset, piece.target_offset, piece.length),
            )
            for index, piece in enumerate(pieces)
        )
    )


def grid(
    num_rows: int,
    length: int,
    stride: Stride,
    source_bases: Sequence[Base] = (Base(0, 0, 0),),
    target_bases: Sequence[Base] = (Base(0, 0, 0),),
) -> Binding:
    """Return a binding of equal pieces at equal distances, the same from each base."""
    pieces = _rows(0, 0, length, num_rows, stride)
    return Binding((BindingPart("raw", "grid", tuple(source_bases), tuple(target_bases), pieces),))


def _rows(
    source_offset: int,
    target_offset: int,
    length: int,
    num_rows: int = 1,
    stride: Stride = NO_STRIDE,
) -> Pieces:
    return Pieces(
        _single(source_offset),
        _single(target_offset),
        _single(length),
        rows=_single(num_rows),
        cols=_single(1),
        row_stride=stride,
        col_stride=NO_STRIDE,
        whole_pages=False,
    )


def _single(number: int) -> Int64s:
    return np.array([number], dtype=np.int64)


def pattern(seed: int, num_bytes: int) -> Bytes:
    """Return pseudo-random bytes, the same in every process."""
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), dtype=np.uint8).copy()


def after(binding: Binding, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[Bytes]:
    """Return the targets' regions after a write of the binding and nothing else."""
    result = [region.copy() for region in targets]
    copy_pieces(binding.descriptors(), sources, result)
    return result


def copy_by_memmove(binding: Binding, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy one piece at a time: the ``copy`` that transports get in tests."""
    columns = (column.tolist() for column in binding.descriptors())
    for source, at, target, to, length in zip(*columns, strict=True):
        ctypes.memmove(targets[target] + to, sources[source] + at, length)
