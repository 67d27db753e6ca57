from __future__ import annotations

import pytest

from kvferry import InputError
from kvferry.connectors.vllm.params import asked_of_decode, asked_of_prefill, for_decode


def test_what_prefill_answers_is_what_decode_takes() -> None:
    asked = asked_of_decode(for_decode("r", "prefill-0", 35))
    assert asked is not None
    assert (asked.room, asked.prefill, asked.tokens) == ("r", "prefill-0", 35)


def test_prefill_takes_what_proxies_send() -> None:
    sent = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    asked = asked_of_prefill(sent)
    assert asked is not None
    assert asked.room is None
    assert asked_of_decode(sent) is None


def test_prefill_takes_a_room() -> None:
    asked = asked_of_prefill({"do_remote_decode": True, "kvferry": {"room": 7, "more": 1}})
    assert asked is not None
    assert asked.room == 7


@pytest.mark.parametrize("params", [None, {}, [], "x", 3, {"do_remote_decode": 1}])
def test_nobody_asks(params: object) -> None:
    assert asked_of_prefill(params) is None
    assert asked_of_decode(params) is None


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
def test_what_decode_can_not_use_is_one_sentence(own: object) -> None:
    with pytest.raises(InputError, match="pass on what prefill answered with"):
        asked_of_decode({"do_remote_prefill": True, "kvferry": own})


@pytest.mark.parametrize("own", [[1], "x", {"room": -1}, {"room": "\ud800"}])
def test_what_prefill_can_not_use(own: object) -> None:
    with pytest.raises(InputError, match="can't be used"):
        asked_of_prefill({"do_remote_decode": True, "kvferry": own})
