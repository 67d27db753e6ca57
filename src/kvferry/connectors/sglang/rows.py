"""Rows of SGLang's metadata buffers, in host memory: read at a source, written at a target."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvferry import InputError
from kvferry.connectors.sglang.metadata import RowShape


class MetadataRows:
    """One row a request, in every buffer. ``checksums``: a buffer of those follows the room's."""

    def __init__(
        self,
        addresses: Sequence[int],
        lengths: Sequence[int],
        row_lengths: Sequence[int],
        *,
        checksums: bool = False,
    ) -> None:
        self._addresses = list(addresses)
        self._num_rows = min(
            length // row for length, row in zip(lengths, row_lengths, strict=True)
        )
        self.shape = RowShape(tuple(row_lengths), len(self._addresses) - 1 - checksums)

    def read(self, index: int) -> list[bytes]:
        """A request's row."""
        return [
            ctypes.string_at(place, length)
            for place, length in zip(self._places(index), self.shape.lengths, strict=True)
        ]

    def write(self, index: int, row: Sequence[bytes]) -> None:
        """Fill a request's row; the room, which says that it is filled, comes last."""
        places = self._places(index)
        last = self.shape.room
        for part in [*(part for part in range(len(row)) if part != last), last]:
            ctypes.memmove(places[part], row[part], len(row[part]))

    def _places(self, index: int) -> list[int]:
        if not 0 <= index < self._num_rows:
            raise InputError(f"there is no metadata row {index}; SGLang has {self._num_rows}")
        return [
            address + index * length
            for address, length in zip(self._addresses, self.shape.lengths, strict=True)
        ]
