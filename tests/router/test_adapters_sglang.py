"""A router in front of SGLang: one request to both workers, with a room per choice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry import InputError
from kvferry.router.adapters import SglangAdapter, adapter_of
from kvferry.router.bodies import ApiCall
from kvferry.router.options import EngineName, OnFailure, RouterOptions

VLLM, SGLANG = EngineName.VLLM, EngineName.SGLANG

BOOTSTRAP = "10.0.0.2:8998"


def ask(**body: Any) -> ApiCall:
    return ApiCall("/v1/completions", {"model": "m"} | body, "m", False, OnFailure.LOCAL)


def test_both_workers_get_the_request_and_decode_the_address() -> None:
    adapter, asked = adapter_of(EngineName.SGLANG), ask(prompt="p", max_tokens=9, stream=True)
    prompt = json.loads(adapter.for_prefill(asked, 7, 2.0))
    assert prompt == {"model": "m", "prompt": "p", "max_tokens": 9, "bootstrap_room": 7}
    answer = json.loads(adapter.for_decode(asked, 7, BOOTSTRAP, 2.0))
    assert (answer["stream"], answer["bootstrap_room"]) == (True, 7)
    assert (answer["bootstrap_host"], answer["bootstrap_port"]) == ("10.0.0.2", 8998)


@pytest.mark.parametrize(
    ("body", "rooms"),
    [
        ({"prompt": [1, 2]}, 7),
        ({"prompt": ["p"]}, [7]),
        ({"prompt": ["p", "q"]}, [7, 8]),
        ({"prompt": [[1], [2]], "n": 2}, [7, 8, 9, 10]),
        ({"messages": [], "n": 3}, [7, 8, 9]),
    ],
)
def test_each_choice_has_a_room(body: dict[str, Any], rooms: int | list[int]) -> None:
    adapter, asked = SglangAdapter(), ask(**body)
    assert adapter.can_split(asked)
    assert json.loads(adapter.for_prefill(asked, 7, 2.0))["bootstrap_room"] == rooms
    answer = json.loads(adapter.for_decode(asked, 7, BOOTSTRAP, 2.0))
    assert answer["bootstrap_room"] == rooms
    if isinstance(rooms, list):
        assert answer["bootstrap_port"] == [8998] * len(rooms)


def test_room_ids_stay_within_63_bits() -> None:
    asked = ask(prompt=["p", "q"])
    body = json.loads(SglangAdapter().for_prefill(asked, (1 << 63) - 1, 2.0))
    assert body["bootstrap_room"] == [(1 << 63) - 2, (1 << 63) - 1]


def test_a_prefill_needs_its_bootstrap_address() -> None:
    for url in ("http://h:1", "p=http://h:1"):
        with pytest.raises(InputError, match="HOST:PORT=URL"):
            RouterOptions(engine=EngineName.SGLANG, prefill_urls=(url,))
    RouterOptions(engine=EngineName.SGLANG, prefill_urls=(f"{BOOTSTRAP}=http://h:1",))


def test_vllm_sends_its_first_token_to_sglang() -> None:
    adapter, asked = adapter_of(VLLM, SGLANG), ask(prompt="p", max_tokens=9, stream=True)
    prompt = json.loads(adapter.for_prefill(asked, 7, 2.0))
    own = {"room": 7, "first_token": True}
    params = {"do_remote_decode": True, "kvferry": own}
    assert prompt == {"model": "m", "prompt": "p", "max_tokens": 1, "kv_transfer_params": params}
    answer = json.loads(adapter.for_decode(asked, 7, BOOTSTRAP, 2.0))
    where = {"bootstrap_host": "10.0.0.2", "bootstrap_port": 8998, "bootstrap_room": 7}
    assert answer == asked.body | where


def test_vllm_names_the_instance_of_sglang() -> None:
    adapter, asked = adapter_of(SGLANG, VLLM), ask(prompt="p", max_tokens=9, stream=True)
    prompt = json.loads(adapter.for_prefill(asked, 7, 2.0))
    assert prompt == {"model": "m", "prompt": "p", "max_tokens": 9, "bootstrap_room": 7}
    own = {"room": 7, "prefill": f"sglang/{BOOTSTRAP}/dp0of1"}
    answer = json.loads(adapter.for_decode(asked, 7, BOOTSTRAP, 2.0))
    params = {"do_remote_prefill": True, "kvferry": own}
    assert answer == asked.body | {"kv_transfer_params": params}
    assert "kv_transfer_params" not in json.loads(adapter.whole(ask(kv_transfer_params={})))


@pytest.mark.parametrize("engines", [(VLLM, SGLANG), (SGLANG, VLLM)])
def test_pairs_share_one_prompt_with_one_choice(engines: tuple[EngineName, EngineName]) -> None:
    adapter = adapter_of(*engines)
    assert adapter.can_split(ask(prompt="p"))
    assert not adapter.can_split(ask(prompt="p", n=2))
    assert not adapter.can_split(ask(prompt=["p", "q"]))
    assert not adapter.may_continue(ask(prompt="p", stream=True))


def test_pairs_name_prefill_by_an_address() -> None:
    named = (f"{BOOTSTRAP}=http://h:1",)
    RouterOptions(engine=VLLM, decode_engine=SGLANG, prefill_urls=named)
    with pytest.raises(InputError, match="discovery or bootstrap service; give 'p=http://h:1' as"):
        RouterOptions(engine=VLLM, decode_engine=SGLANG, prefill_urls=("p=http://h:1",))
    with pytest.raises(InputError, match="pairs vLLM and SGLang with each other only"):
        RouterOptions(decode_engine=VLLM)
