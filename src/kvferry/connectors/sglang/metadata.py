"""Metadata of a room: the bytes that the lead source sends with a request's cache.

Between two SGLang servers it is one row of SGLang's metadata buffers (first token, counts,
logprobs, room id). Another engine sends only the first token (``connectors/first_token.py``); the
row made from it holds that token and the room id.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec

from kvferry import InputError
from kvferry.connectors.first_token import FirstSample, SampleMetadata

ROOM_BYTES = 8


class RoomMetadata(SampleMetadata, frozen=True):
    """The metadata. ``row`` has a part for each of SGLang's metadata buffers."""

    row: tuple[bytes, ...] = ()


class RowShape(msgspec.Struct, frozen=True):
    """Lengths of a row's parts, index of the room's part, and width of a token."""

    lengths: tuple[int, ...]
    room: int
    token_bytes: int = 4


def encoded(row: Sequence[bytes], shape: RowShape) -> bytes:
    """Return an encoded row."""
    token = int.from_bytes(row[0][: shape.token_bytes], "little", signed=True)
    return msgspec.msgpack.encode(RoomMetadata(FirstSample(token), tuple(row)))


def decoded(data: bytes, shape: RowShape, room: int) -> tuple[bytes, ...]:
    """Return the sent row, or one made from the first token. Raise ``InputError`` if invalid."""
    try:
        metadata = msgspec.msgpack.decode(data, type=RoomMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"cannot decode the prefill server's metadata: {error}") from None
    if not metadata.row:
        return _row_of_token(metadata.sample.token, shape, room)
    lengths = tuple(map(len, metadata.row))
    if lengths != shape.lengths:
        raise InputError(
            f"the prefill server's metadata has parts of {lengths} bytes, this server's has "
            f"{shape.lengths}; give both servers the same speculative and logprob settings"
        )
    return metadata.row


def _row_of_token(token: int, shape: RowShape, room: int) -> tuple[bytes, ...]:
    parts = [bytes(length) for length in shape.lengths]
    parts[0] = _with_prefix(token.to_bytes(shape.token_bytes, "little", signed=True), parts[0])
    parts[shape.room] = _with_prefix(room.to_bytes(ROOM_BYTES, "little"), parts[shape.room])
    return tuple(parts)


def _with_prefix(value: bytes, part: bytes) -> bytes:
    return value + part[len(value) :]


class MetadataRows:
    """Rows of SGLang's metadata buffers in host memory, one per request.

    ``checksums``: a buffer of checksums follows that of the room ids.
    """

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
        """Return a request's row."""
        return [
            ctypes.string_at(place, length)
            for place, length in zip(self._places(index), self.shape.lengths, strict=True)
        ]

    def write(self, index: int, row: Sequence[bytes]) -> None:
        """Write a request's row; the room id comes last, because it marks the row as complete."""
        places = self._places(index)
        last = self.shape.room
        for part in [*(part for part in range(len(row)) if part != last), last]:
            ctypes.memmove(places[part], row[part], len(row[part]))

    def _places(self, index: int) -> list[int]:
        if not 0 <= index < self._num_rows:
            raise InputError(f"metadata row {index} does not exist; SGLang has {self._num_rows}")
        return [
            address + index * length
            for address, length in zip(self._addresses, self.shape.lengths, strict=True)
        ]
