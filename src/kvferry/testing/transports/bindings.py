"""Bindings and bytes for tests of transports, and what a write of them must leave behind."""

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


class PlacedPiece(NamedTuple):
    """One contiguous piece: where it is read and where it is written."""

    source_offset: int
    target_offset: int
    length: int
    source_region: int = 0
    target_region: int = 0


def binding_of(pieces: Iterable[PlacedPiece]) -> Binding:
    """A binding of just those pieces, which may lie anywhere, also outside."""
    return Binding(tuple(_part(index, piece) for index, piece in enumerate(pieces)))


def _part(index: int, piece: PlacedPiece) -> BindingPart:
    return BindingPart(
        "raw",
        f"piece{index}",
        (Base(0, piece.source_region, 0),),
        (Base(0, piece.target_region, 0),),
        Pieces(
            _single(piece.source_offset),
            _single(piece.target_offset),
            _single(piece.length),
            rows=_single(1),
            cols=_single(1),
            row_stride=Stride(0, 0),
            col_stride=Stride(0, 0),
            whole_pages=False,
        ),
    )


def _single(number: int) -> Int64s:
    return np.array([number], dtype=np.int64)


def grid(
    num_rows: int,
    length: int,
    stride: Stride,
    source_bases: Sequence[Base] = (Base(0, 0, 0),),
    target_bases: Sequence[Base] = (Base(0, 0, 0),),
) -> Binding:
    """Equal pieces at equal distances, the same in every layer."""
    pieces = Pieces(
        _single(0),
        _single(0),
        _single(length),
        rows=_single(num_rows),
        cols=_single(1),
        row_stride=stride,
        col_stride=Stride(0, 0),
        whole_pages=False,
    )
    return Binding((BindingPart("raw", "grid", tuple(source_bases), tuple(target_bases), pieces),))


def pattern(seed: int, num_bytes: int) -> Bytes:
    """Bytes that are alike in every process."""
    return np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), dtype=np.uint8).copy()


def after(binding: Binding, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[Bytes]:
    """What the targets hold once the binding has been written, and nothing else has."""
    result = [region.copy() for region in targets]
    copy_pieces(binding.descriptors(), sources, result)
    return result


def copy_by_memmove(binding: Binding, sources: Sequence[int], targets: Sequence[int]) -> None:
    """The ``copy`` that transports get here: plain, slow, one piece at a time."""
    columns = (column.tolist() for column in binding.descriptors())
    for source, at, target, to, length in zip(*columns, strict=True):
        ctypes.memmove(targets[target] + to, sources[source] + at, length)
