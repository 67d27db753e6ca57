"""Streams through kvferry's router whose first token comes from prefill, on real engines.

Each answer is compared with the stream of one engine that computes the whole request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import Deployment, Json, Server, log, metric, stream, timed
from tests_vllm.waiting import eventually, is_idle

EARLY = "kvferry_router_first_tokens_from_prefill_total"
PROMPTS = (
    "The ferry",
    "Die Fähre fährt über den Fluß und",
    "An emoji for a boat is",
    "The ferry carries apples, pears, plums and figs over the river. " * 30,
)
CHAT = [{"role": "user", "content": "Name three rivers in Asia."}]


class Engines(NamedTuple):
    """One prefill of three ranks, one decode, and a router."""

    prefill: Server
    decode: Server
    router: Server


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Deployment() as deployment, timed("vLLM prefill TP3, decode TP1, and a router"):
        servers = [
            deployment.vllm(
                *(name, plain()),
                tp=tp,
                transfer=deployment.connector(role, name, "recompute"),
                more="--no-enable-prefix-caching",
            )
            for name, tp, role in (("prefill", 3, "kv_producer"), ("decode", 1, "kv_consumer"))
        ]
        for server in servers:
            server.wait_until_up()
        prefill, decode = servers
        yield Engines(prefill, decode, deployment.router([prefill], decode))


def essence(chunks: list[Json]) -> Json:
    """Return what an answer means: its text, token ids, reason to end, and usage."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [c["text"] if "text" in c else c["delta"].get("content") for c in choices]
    usage = chunks[-1]["usage"]
    return {
        "text": "".join(text or "" for text in texts),
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "end": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": (usage["prompt_tokens"], usage["completion_tokens"]),
        "objects": {chunk["object"] for chunk in chunks},
        "num_ids": len({chunk["id"] for chunk in chunks}),
    }


def compare(engines: Engines, path: str = "completions", **fields: Any) -> float:
    """Compare a stream with one engine's; return how many began with prefill's token."""
    before = metric(engines.router, EARLY)
    got = essence(stream(engines.router, path, **fields))
    # The decode engine computes the request itself, without prefix caching.
    want = essence(stream(engines.decode, path, **fields))
    assert got == want
    log(f"{fields}: {got['text'][:60]!r}")
    return metric(engines.router, EARLY) - before


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_stream_is_that_of_one_engine(engines: Engines, prompt: str) -> None:
    num_early = compare(engines, prompt=prompt, return_token_ids=True, max_tokens=40)
    assert num_early == 1


def test_a_chat_is_that_of_one_engine(engines: Engines) -> None:
    assert compare(engines, "chat/completions", messages=CHAT, return_token_ids=True) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 7, "temperature": 0.9},
        {"stop": ["river", "."]},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"max_tokens": 1},
        {"logprobs": 2},
        {"min_tokens": 4},
    ],
)
def test_decode_begins_where_prefills_token_would_not_be_exact(
    engines: Engines, fields: dict[str, Any]
) -> None:
    assert compare(engines, prompt=PROMPTS[3], return_token_ids=True, **fields) == 0


def test_penalties_of_the_whole_text_stay_exact(engines: Engines) -> None:
    assert compare(engines, prompt=PROMPTS[0], return_token_ids=True, repetition_penalty=1.3) == 1


def test_an_answer_that_ends_with_the_first_token_comes_from_decode(engines: Engines) -> None:
    """The bias makes the end-of-sequence token certain."""
    bias = {"2": 100}
    assert compare(engines, prompt="The end", logit_bias=bias, return_token_ids=True) == 0


def test_nothing_is_held_after_the_streams(engines: Engines) -> None:
    eventually(lambda: is_idle(engines.prefill) and is_idle(engines.decode), "blocks are released")
    assert metric(engines.decode, "vllm:kvferry_rooms_failed_total") == 0
