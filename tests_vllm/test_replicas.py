"""Two data-parallel prefill replicas and two decodes, with small caches.

The replicas share a port. Requests reach them in sequence, where vLLM chooses the replica, and
through the router, which chooses it. One decode has the policy "recompute", the other "fail". A
decode's cache has room for one long request, so that vLLM preempts the second; prefill is
preempted between chunks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import (
    BLOCK_TOKENS,
    Deployment,
    HttpError,
    Json,
    Server,
    complete,
    log,
    metric,
    prefilled_then_decoded,
    timed,
    token_ids,
)
from tests_vllm.waiting import SOON_S, eventually, is_idle

ANSWER = 8
# 34 blocks of 30 layers, 3 heads, K and V of 64 floats; vLLM reserves one block.
SMALL = 34 * BLOCK_TOKENS * 30 * 3 * 2 * 64 * 4
LONG = 15 * BLOCK_TOKENS
# Two long prompts take 30 of 33 blocks, and each answer needs two more.
LONG_ANSWER = BLOCK_TOKENS + 8
REPLICAS = {"prefill-dp0", "prefill-dp1"}


class Engines(NamedTuple):
    """Two replicas on one port, and two decodes, of which the second also prefills."""

    prefill: Server
    left: Server
    right: Server


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as deployment:
        yield deployment


@pytest.fixture(scope="module")
def engines(deployment: Deployment) -> Iterator[Engines]:
    what = "vLLM prefill on two data-parallel replicas, and two decodes"
    with timed(what):
        more = "--no-enable-prefix-caching --max-num-batched-tokens 256"
        # The last flag admits a prompt before there is room for all of it.
        small = f"{more} --no-scheduler-reserve-full-isl --max-model-len 1024"
        servers = Engines(
            deployment.vllm(
                *("prefill", plain()),
                transfer=deployment.connector("kv_producer", "prefill"),
                more=f"{more} --data-parallel-size 2",
            ),
            deployment.vllm(
                *("left", plain()),
                transfer=deployment.connector("kv_consumer", "left", "recompute"),
                cache_bytes=SMALL,
                more=small,
            ),
            deployment.vllm(
                *("right", plain()),
                transfer=deployment.connector("kv_both", "right", "fail"),
                cache_bytes=SMALL,
                more=small,
            ),
        )
        for server in servers:
            server.wait_until_up()
        log("all are up")
        yield servers


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Return token ids with a unique beginning."""
    return [1000 + number, *((11 * i + number) % 997 + 500 for i in range(num_tokens - 1))]


def alone(engines: Engines, prompt: list[int], max_tokens: int = ANSWER) -> list[int]:
    """Return the answer of a single engine."""
    return token_ids(complete(engines.prefill, prompt, max_tokens))


def all_idle(engines: Engines) -> None:
    eventually(lambda: all(map(is_idle, engines)), "blocks are released")


def test_every_replica_serves_every_decode(engines: Engines) -> None:
    prompts = [prompt_of(number, 40 + 60 * number) for number in range(8)]

    def answered(number: int) -> tuple[str, list[int]]:
        decode = engines.left if number % 2 else engines.right
        params = prefilled(engines.prefill, prompts[number])
        answer = complete(decode, prompts[number], ANSWER, kv_transfer_params=params)
        return params["kvferry"]["prefill"], token_ids(answer)

    with timed("8 requests at once, 2 replicas to 2 decodes"), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answered, range(8)))
    assert {name for name, _ in answers} == REPLICAS
    for prompt, (_, tokens) in zip(prompts, answers, strict=True):
        assert tokens == alone(engines, prompt)
    for decode in (engines.left, engines.right):
        assert metric(decode, "vllm:kvferry_rooms_done_total") == 4
    all_idle(engines)


def test_router_chooses_the_replica(engines: Engines, deployment: Deployment) -> None:
    router = deployment.router([engines.prefill], engines.left, replicas="*2")
    prompts = [prompt_of(10 + number, 40 + 30 * number) for number in range(6)]
    done, failed = "vllm:kvferry_rooms_done_total", "vllm:kvferry_rooms_failed_total"
    before = metric(engines.left, done)
    with timed("6 requests at once through the router"), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: complete(router, prompt, ANSWER), prompts))
    assert (metric(engines.left, done), metric(engines.left, failed)) == (before + 6, 0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert token_ids(answer) == alone(engines, prompt)
    all_idle(engines)


def test_unknown_prefill_fails_early(engines: Engines) -> None:
    prompt = prompt_of(18, 100)
    own = {"room": "invented", "prefill": "nobody"}
    params = {"do_remote_prefill": True, "kvferry": own}
    began = time.monotonic()
    with timed("an instance that was never there, with fail"), pytest.raises(HttpError) as caught:
        complete(engines.right, prompt, ANSWER, kv_transfer_params=params)
    assert caught.value.status == 500
    with timed("the same, with recompute"):
        answer = complete(engines.left, prompt, ANSWER, kv_transfer_params=params)
    assert time.monotonic() - began < SOON_S  # and a room's deadline is 120 s
    assert token_ids(answer) == alone(engines, prompt)
    for decode in (engines.left, engines.right):
        assert "nobody has registered as 'nobody'" in decode.log.read_text()
    all_idle(engines)


def prefilled(server: Server, prompt: list[int], **own: str) -> Json:
    """Prefill a prompt and return the parameters for decode."""
    given = {"do_remote_decode": True, "kvferry": own}
    return dict(complete(server, prompt, 1, kv_transfer_params=given)["kv_transfer_params"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_preempted_decode_answers_correctly(engines: Engines, side: str) -> None:
    decode: Server = getattr(engines, side)
    prompts = [prompt_of(20 + number, LONG) for number in range(2)]
    before = metric(decode, "vllm:num_preemptions_total")

    # Prefill both first, so that decode has both at the same time.
    params = [prefilled(engines.prefill, prompt) for prompt in prompts]

    def answered(prompt: list[int], own: Json) -> list[int]:
        return token_ids(complete(decode, prompt, LONG_ANSWER, kv_transfer_params=own))

    with timed("two long requests where one has room"), ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(answered, prompts, params))
    assert metric(decode, "vllm:num_preemptions_total") > before
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert tokens == alone(engines, prompt, LONG_ANSWER)
    all_idle(engines)


def test_preempted_prefill_opens_a_new_room(engines: Engines) -> None:
    mine, other = prompt_of(30, 2 * LONG - 64), prompt_of(31, LONG)
    before = metric(engines.right, "vllm:num_preemptions_total")
    with timed("a prefill has no room for its last chunk"), ThreadPoolExecutor(1) as pool:
        held = pool.submit(complete, engines.right, other, 3 * BLOCK_TOKENS)
        eventually(lambda: metric(engines.right, "vllm:num_requests_running") > 0, "it runs")
        answer = prefilled_then_decoded(engines.right, engines.left, mine, ANSWER)
        tokens = token_ids(held.result())
    assert metric(engines.right, "vllm:num_preemptions_total") > before
    assert token_ids(answer) == alone(engines, mine)
    assert tokens == alone(engines, other, 3 * BLOCK_TOKENS)
    all_idle(engines)


def test_policies_recompute_and_fail(engines: Engines) -> None:
    prompt, another = prompt_of(40, 100), prompt_of(41, 100)
    wrong = [prefilled(engines.prefill, another) for _ in range(2)]
    with timed("another prompt's room, with recompute"):
        answer = complete(engines.left, prompt, ANSWER, kv_transfer_params=wrong[0])
    assert token_ids(answer) == alone(engines, prompt)
    with timed("another prompt's room, with fail"), pytest.raises(HttpError) as caught:
        complete(engines.right, prompt, ANSWER, kv_transfer_params=wrong[1])
    assert caught.value.status == 500
    for decode in (engines.left, engines.right):
        assert "content-differs" in decode.log.read_text()
    all_idle(engines)
