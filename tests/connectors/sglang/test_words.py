"""Names of instances, metadata and prompts, as the two sides exchange them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from kvferry import InputError
from kvferry.connectors.liveness import LIVENESS, LIVENESS_SETTINGS
from kvferry.connectors.sglang.instances import Replica, instances_at
from kvferry.connectors.sglang.metadata import RowShape, decoded, encoded
from kvferry.connectors.sglang.prompts import prompt_of
from kvferry.connectors.sglang.rows import MetadataRows
from kvferry.connectors.sglang.settings import liveness_in, transport_in
from kvferry.reference.engine.requests import Sample
from kvferry.reference.transfer.messages import FirstTokenNote, encode

SHAPE = RowShape((64, 16, 64), room=2)
ROOM = (1 << 62) + 7


def test_a_server_s_replicas_are_found_by_their_rank() -> None:
    names = [str(Replica("10.0.0.1:8998", rank, 2)) for rank in (1, 0)]
    info = instances_at("prefill:8998", names)
    assert info.names == ("sglang/10.0.0.1:8998/dp0of2", "sglang/10.0.0.1:8998/dp1of2")
    assert info.dp_size == 2
    assert Replica.parse(info.names[1]) == Replica("10.0.0.1:8998", 1, 2)


def test_a_replica_that_is_late_is_waited_for_by_name() -> None:
    assert instances_at("a", [str(Replica("a", 1, 3))]).dp_size == 3


def test_another_engine_alone_is_taken_by_its_address() -> None:
    assert instances_at("a", ["prefill-0"]).names == ("prefill-0",)
    assert instances_at("a", ["decode-0", "sglang/a/dp0of1"]).names == ("sglang/a/dp0of1",)


@pytest.mark.parametrize("names", [[], ["p", "q"], ["sglang/a/dp0of1", "sglang/b/dp0of1"]])
def test_an_address_that_could_mean_several_is_refused(names: list[str]) -> None:
    with pytest.raises(InputError, match="one SGLang prefill server, or one other instance"):
        instances_at("here", names)


def row(token: int) -> list[bytes]:
    return [
        token.to_bytes(4, "little").ljust(64, b"\1"),
        b"\2" * 16,
        ROOM.to_bytes(8, "little") * 8,
    ]


def test_a_row_arrives_as_it_was_sent() -> None:
    assert list(decoded(encoded(row(42), SHAPE), SHAPE, ROOM)) == row(42)


def test_our_own_engine_reads_the_first_token_of_a_row() -> None:
    assert msgspec.msgpack.decode(encoded(row(42), SHAPE), type=FirstTokenNote).sample.token == 42


def test_our_own_engine_s_first_token_makes_a_row() -> None:
    made = decoded(encode(FirstTokenNote(Sample("r", 42))), SHAPE, ROOM)
    assert [len(part) for part in made] == [64, 16, 64]
    assert made[0] == (42).to_bytes(4, "little").ljust(64, b"\0")
    assert made[2][:8] == ROOM.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xc1", "can't be read"),
        (encoded(row(1)[:2], RowShape((64, 16), room=1)), "give both servers the same"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(data: bytes, says: str) -> None:
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


def test_the_room_comes_before_the_checksum() -> None:
    assert MetadataRows([1, 2, 3], [8, 8, 8], [8, 8, 8], checksums=True).shape.room == 1


def request(**said: Any) -> SimpleNamespace:
    usual = {"lora_id": None, "cache_salt": None, "extra_key": None, "multimodal_inputs": None}
    return SimpleNamespace(origin_input_ids=[5, 6, 7], **{**usual, **said})


def test_prompts_that_differ_in_anything_have_other_digests() -> None:
    pictures = SimpleNamespace(mm_items=[SimpleNamespace(hash=17)])
    requests = [
        request(),
        request(lora_id="a"),
        request(cache_salt="a"),
        request(extra_key="a"),
        request(multimodal_inputs=pictures),
        SimpleNamespace(**{**vars(request()), "origin_input_ids": [5, 6, 8]}),
    ]
    digests = [prompt_of(each, model="m", dtype="float32").digest for each in requests]
    assert len(set(digests)) == len(requests)
    assert prompt_of(request(), model="m", dtype="float32").num_tokens == 3
    assert prompt_of(request(), model="m", dtype="float32").digest == digests[0]


def test_the_environment_names_the_transport() -> None:
    assert transport_in({}) == "auto"
    assert transport_in({"KVFERRY_TRANSPORT": "mooncake"}) == "mooncake"


def test_the_environment_sets_liveness_timeouts() -> None:
    assert liveness_in({}) == liveness_in({"KVFERRY_SILENCE_S": ""}) == LIVENESS
    assert LIVENESS.silence_s == 20
    given = {name: 30.0 + index for index, name in enumerate(LIVENESS_SETTINGS)}
    said = {f"KVFERRY_{name.upper()}": str(seconds) for name, seconds in given.items()}
    assert liveness_in(said) == replace(LIVENESS, **given)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("long", "could not convert"),
        ("0", "must be above 0 and finite"),
        ("nan", "must be above 0 and finite"),
        ("1.5", "must be at least twice heartbeat_s"),
    ],
)
def test_a_bad_timeout_is_one_sentence(said: str, why: str) -> None:
    remedy = f"KVFERRY_SILENCE_S is a number of seconds, such as 20, and {said!r} can't be used"
    with pytest.raises(InputError, match=f"{remedy}: .*{why}"):
        liveness_in({"KVFERRY_SILENCE_S": said})


def test_the_page_tells_of_every_timeout() -> None:
    page = (Path(__file__).parents[3] / "docs" / "connectors" / "sglang.md").read_text()
    assert [name for name in LIVENESS_SETTINGS if f"`KVFERRY_{name.upper()}`" not in page] == []
