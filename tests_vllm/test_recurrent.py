"""Mamba-2 state beside attention, TP2→1, TP1→2 and TP1→1.

vLLM has four cache groups here, one for attention and three for state, which share memory. Prompts
end at and next to block boundaries, and the longest are prefilled in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests_vllm.recurrent import (
    HEAD_DIM,
    INNER,
    KERNEL,
    KINDS,
    KV_HEADS,
    MAMBA_HEAD_DIM,
    MAMBA_HEADS,
    STATE,
    VOCABULARY,
    granite,
)
from tests_vllm.servers import (
    SKIPPED,
    STATELESS,
    Deployment,
    HttpError,
    Server,
    complete,
    log,
    metric,
    prefilled_then_decoded,
    timed,
    token_ids,
)
from tests_vllm.waiting import eventually, is_idle

ANSWER = 10
# vLLM enlarges blocks of 32 tokens to the size of a layer's state.
BLOCK = 64
LENGTHS = (1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 300, 555)


class Engines(NamedTuple):
    """One engine on two ranks, and two on one rank."""

    two: Server
    one: Server
    other: Server


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = granite(tmp_path_factory.mktemp("recurrent"))
    with Deployment() as deployment, timed("vLLM TP2 and twice TP1, layers with state"):
        more = "--no-enable-prefix-caching --max-num-batched-tokens 256"
        skipping = deployment.connector("kv_both", "one", "recompute") | {
            "kv_connector": "SkippingConnector",
            "kv_connector_module_path": "tests_vllm.skipping",
        }
        two = deployment.connector("kv_both", "two")
        other = deployment.connector("kv_producer", "other")
        servers = Engines(
            deployment.vllm("two", model, tp=2, transfer=two, more=more),
            deployment.vllm("one", model, transfer=skipping, more=more),
            deployment.vllm("other", model, transfer=other, more=more),
        )
        for server in servers:
            server.wait_until_up()
        log("all are up")
        yield servers


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Return token ids with a unique beginning."""
    return [(7 * number + 13 * i * i) % (VOCABULARY - 10) + 5 for i in range(num_tokens)]


def answered(prefill: Server, decode: Server, prompt: list[int]) -> list[int]:
    return token_ids(prefilled_then_decoded(prefill, decode, prompt, ANSWER, ignore_eos=True))


def alone(engines: Engines, prompt: list[int]) -> list[int]:
    """Return the answer of a single engine."""
    return token_ids(complete(engines.other, prompt, ANSWER, ignore_eos=True))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("sizes", ["2 to 1", "1 to 2", "1 to 1"])
def test_the_answer_is_that_of_one_engine(engines: Engines, sizes: str, num_tokens: int) -> None:
    prefill, decode = {
        "2 to 1": (engines.two, engines.one),
        "1 to 2": (engines.one, engines.two),
        "1 to 1": (engines.other, engines.one),
    }[sizes]
    prompt = prompt_of(10 * num_tokens + len(prefill.name), num_tokens)
    with timed(f"TP{sizes.replace('to', '→')}, {num_tokens} tokens"):
        tokens = answered(prefill, decode, prompt)
    assert tokens == alone(engines, prompt)


@pytest.mark.parametrize("prefix", [SKIPPED, STATELESS], ids=["nothing", "no state"])
def test_missing_data_changes_the_answer(engines: Engines, prefix: str) -> None:
    prompt = prompt_of(3, 100)
    given = {"do_remote_decode": True, "kvferry": {"room": f"{prefix}1"}}
    params = complete(engines.two, prompt, 1, kv_transfer_params=given)["kv_transfer_params"]
    answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=params, ignore_eos=True)
    assert token_ids(answer) != alone(engines, prompt)


def test_state_is_transferred_once(engines: Engines) -> None:
    prompt = prompt_of(5, 8 * BLOCK)
    rooms, sent = "vllm:kvferry_rooms_done_total", "vllm:kvferry_bytes_sent_total"
    before = metric(engines.other, rooms), metric(engines.other, sent)
    assert answered(engines.other, engines.one, prompt) == alone(engines, prompt)
    eventually(lambda: metric(engines.other, rooms) > before[0], "the room is counted")
    state = (KERNEL - 1) * (INNER + 2 * STATE) + MAMBA_HEADS * MAMBA_HEAD_DIM * STATE
    # Decode computes the last token.
    attention = (len(prompt) - 1) * KV_HEADS * 2 * HEAD_DIM
    assert metric(engines.other, sent) - before[1] == 4 * (
        KINDS.count("mamba") * state + KINDS.count("attention") * attention
    )


def test_concurrent_requests(engines: Engines) -> None:
    prompts = [prompt_of(60 + number, 90 + 35 * number) for number in range(6)]
    for prefill, decode in ((engines.two, engines.one), (engines.one, engines.two)):
        with timed("6 requests at once"), ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(partial(answered, prefill, decode), prompts))
        for prompt, tokens in zip(prompts, answers, strict=True):
            assert tokens == alone(engines, prompt)
    eventually(lambda: all(map(is_idle, engines)), "blocks are released")


def test_request_to_both_sides_in_parallel(engines: Engines) -> None:
    prompt = prompt_of(9, 300)
    own: dict[str, Any] = {"room": "both"}
    first = {"do_remote_decode": True, "kvferry": own}
    second = {"do_remote_prefill": True, "kvferry": own | {"prefill": "two"}}
    with timed("both at once"), ThreadPoolExecutor(1) as pool:
        computed = pool.submit(complete, engines.two, prompt, 1, kv_transfer_params=first)
        answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=second, ignore_eos=True)
        computed.result()
    assert token_ids(answer) == alone(engines, prompt)


def test_failure_under_both_policies(engines: Engines) -> None:
    prompt, another = prompt_of(11, 150), prompt_of(12, 150)
    given = {"do_remote_decode": True}
    wrong = complete(engines.two, another, 1, kv_transfer_params=given)["kv_transfer_params"]
    answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=wrong, ignore_eos=True)
    assert token_ids(answer) == alone(engines, prompt)
    wrong = complete(engines.one, another, 1, kv_transfer_params=given)["kv_transfer_params"]
    with pytest.raises(HttpError) as caught:
        complete(engines.two, prompt, ANSWER, kv_transfer_params=wrong)
    assert caught.value.status == 500
    eventually(lambda: all(map(is_idle, engines)), "blocks are released")
