"""Prompts: digests of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.connectors.sglang.prompts import prompt_of


def request(**said: Any) -> SimpleNamespace:
    usual = {"lora_id": None, "cache_salt": None, "extra_key": None, "multimodal_inputs": None}
    return SimpleNamespace(origin_input_ids=[5, 6, 7], **{**usual, **said})


def test_different_prompts_have_different_digests() -> None:
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
