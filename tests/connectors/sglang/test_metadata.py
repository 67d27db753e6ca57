"""Metadata of rooms: rows, the reference engine's form, and buffers in memory."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvferry import InputError
from kvferry.connectors.sglang.metadata import MetadataRows, RowShape, decoded, encoded
from kvferry.reference.engine.requests import Sample
from kvferry.reference.transfer.extensions import FirstTokenNote, encode

SHAPE = RowShape((64, 16, 64), room=2)
ROOM = (1 << 62) + 7


def row(token: int) -> list[bytes]:
    return [
        token.to_bytes(4, "little").ljust(64, b"\1"),
        b"\2" * 16,
        ROOM.to_bytes(8, "little") * 8,
    ]


def test_a_row_round_trips() -> None:
    assert list(decoded(encoded(row(42), SHAPE), SHAPE, ROOM)) == row(42)


def test_reference_engine_reads_the_first_token() -> None:
    assert msgspec.msgpack.decode(encoded(row(42), SHAPE), type=FirstTokenNote).sample.token == 42


def test_reference_engines_first_token_makes_a_row() -> None:
    made = decoded(encode(FirstTokenNote(Sample("r", 42))), SHAPE, ROOM)
    assert [len(part) for part in made] == [64, 16, 64]
    assert made[0] == (42).to_bytes(4, "little").ljust(64, b"\0")
    assert made[2][:8] == ROOM.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xc1", "cannot decode"),
        (encoded(row(1)[:2], RowShape((64, 16), room=1)), "give both servers the same"),
    ],
)
def test_invalid_metadata_is_rejected(data: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        decoded(data, SHAPE, ROOM)


def test_rows_are_read_and_written_in_place() -> None:
    tokens, rooms = np.zeros((4, 16), np.int32), np.zeros((4, 8), np.uint64)
    rows = MetadataRows(
        [tokens.ctypes.data, rooms.ctypes.data], [tokens.nbytes, rooms.nbytes], [64, 64]
    )
    assert rows.shape == RowShape((64, 64), room=1)
    rows.write(2, [(9).to_bytes(4, "little").ljust(64, b"\0"), b"\1" * 64])
    assert tokens[:, 0].tolist() == [0, 0, 9, 0]
    assert rooms[2, 0] == 0x0101010101010101
    assert rows.read(2)[0][:4] == (9).to_bytes(4, "little")
    for index in (-1, 4):
        with pytest.raises(InputError, match="SGLang has 4"):
            rows.read(index)


def test_room_buffer_precedes_checksums() -> None:
    assert MetadataRows([1, 2, 3], [8, 8, 8], [8, 8, 8], checksums=True).shape.room == 1
