"""The metadata of a room: what the lead source adds to a request's cache, as bytes.

Between two SGLang servers it is one row of SGLang's metadata buffers, buffer by buffer (first
token, counts, logprobs, the room's own number). kvferry's own engine says only the first token,
and takes only that: ``sample.token`` is in both, so that either may decode what the other has
prefilled. A row from another engine is filled with nothing else but that token and the room.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry import InputError

ROOM_BYTES = 8


class FirstSample(msgspec.Struct, frozen=True):
    """The first token, as kvferry's own engine names it."""

    token: int
    request: str = ""


class RoomMetadata(msgspec.Struct, frozen=True):
    """What travels. ``row`` has a part for each of SGLang's metadata buffers."""

    sample: FirstSample
    row: tuple[bytes, ...] = ()


class RowShape(msgspec.Struct, frozen=True):
    """The parts of a row: their lengths, which of them is the room, the width of a token."""

    lengths: tuple[int, ...]
    room: int
    token_bytes: int = 4


def encoded(row: Sequence[bytes], shape: RowShape) -> bytes:
    """A row as it travels."""
    token = int.from_bytes(row[0][: shape.token_bytes], "little", signed=True)
    return msgspec.msgpack.encode(RoomMetadata(FirstSample(token), tuple(row)))


def decoded(data: bytes, shape: RowShape, room: int) -> tuple[bytes, ...]:
    """The row that was sent, or one made of the first token. Raises ``InputError``."""
    try:
        said = msgspec.msgpack.decode(data, type=RoomMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the prefill server's metadata can't be read: {error}") from None
    if not said.row:
        return _made_row(said.sample.token, shape, room)
    lengths = tuple(map(len, said.row))
    if lengths != shape.lengths:
        raise InputError(
            f"the prefill server's metadata has parts of {lengths} bytes, and here they have "
            f"{shape.lengths}; give both servers the same speculative and logprob settings"
        )
    return said.row


def _made_row(token: int, shape: RowShape, room: int) -> tuple[bytes, ...]:
    parts = [bytes(length) for length in shape.lengths]
    parts[0] = _at_front(token.to_bytes(shape.token_bytes, "little", signed=True), parts[0])
    parts[shape.room] = _at_front(room.to_bytes(ROOM_BYTES, "little"), parts[shape.room])
    return tuple(parts)


def _at_front(value: bytes, part: bytes) -> bytes:
    return value + part[len(value) :]
