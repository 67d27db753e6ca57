from __future__ import annotations

import pytest

from kvferry import InputError
from kvferry.connectors.vllm.params import (
    decode_params,
    read_decode_params,
    read_holder,
    read_prefill_params,
)


def test_decode_accepts_the_answer_of_prefill() -> None:
    asked = read_decode_params(decode_params("r", "prefill-0", 35))
    assert asked is not None
    assert (asked.room, asked.prefill, asked.tokens) == ("r", "prefill-0", 35)


def test_prefill_accepts_parameters_of_proxies() -> None:
    sent = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    asked = read_prefill_params(sent)
    assert asked is not None
    assert asked.room is None
    assert read_decode_params(sent) is None


def test_prefill_accepts_a_room() -> None:
    asked = read_prefill_params({"do_remote_decode": True, "kvferry": {"room": 7, "more": 1}})
    assert asked is not None
    assert asked.room == 7


@pytest.mark.parametrize("params", [None, {}, [], "x", 3, {"do_remote_decode": 1}])
def test_requests_without_transfer(params: object) -> None:
    assert read_prefill_params(params) is None
    assert read_decode_params(params) is None


@pytest.mark.parametrize(
    "own",
    [
        None,
        {},
        [],
        "room",
        {"room": 1},
        {"room": -1, "prefill": "p"},
        {"room": 1 << 63, "prefill": "p"},
        {"room": "", "prefill": "p"},
        {"room": "x" * 257, "prefill": "p"},
        {"room": "half \udc80", "prefill": "p"},
        {"room": 1, "prefill": "\ud800"},
        {"room": 1.5, "prefill": "p"},
        {"room": True, "prefill": "p"},
        {"room": 1, "prefill": ""},
        {"room": 1, "prefill": {"host": "10.0.0.1"}},
        {"room": 1, "prefill": "p", "tokens": 0},
        {"room": 1, "prefill": "p", "tokens": "many"},
        {"room": 1, "prefill": "p", "tokens": 1 << 80},
    ],
)
def test_invalid_decode_parameters_are_refused(own: object) -> None:
    with pytest.raises(InputError, match="pass on what prefill answered with"):
        read_decode_params({"do_remote_prefill": True, "kvferry": own})


@pytest.mark.parametrize("own", [[1], "x", {"room": -1}, {"room": "\ud800"}])
def test_invalid_prefill_parameters_are_refused(own: object) -> None:
    with pytest.raises(InputError, match="can't be used"):
        read_prefill_params({"do_remote_decode": True, "kvferry": own})


@pytest.mark.parametrize(
    ("params", "holder"),
    [
        (None, None),
        ({"do_remote_decode": True}, None),
        ({"do_remote_decode": True, "kvferry": {"room": 7}}, None),
        ({"do_remote_decode": True, "kvferry": {"room": 7, "holder": "d"}}, "d"),
        ({"kvferry": {"holder": "d"}}, "d"),
        ({"do_remote_prefill": True, "kvferry": {"holder": "d"}}, None),
    ],
)
def test_a_holder_is_for_prompts_that_are_computed_here(params: object, holder: str | None) -> None:
    assert read_holder(params) == holder


@pytest.mark.parametrize("holder", ["", "x" * 999, 7, ["d"], "\ud800"])
def test_invalid_holders_are_refused(holder: object) -> None:
    with pytest.raises(InputError, match="can't be used"):
        read_holder({"kvferry": {"holder": holder}})
