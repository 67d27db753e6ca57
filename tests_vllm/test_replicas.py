"""Prefill on two data-parallel replicas, two decodes, and caches too small for what is asked.

The replicas share a port and are asked in vLLM's own order, which says which of them has computed,
and through the router, which says which of them is to.
One decode recomputes after a failure, the other fails. Their caches hold one long request and not
two, so that vLLM preempts: at decode while it answers, at prefill between two chunks.
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
    Asked,
    Deployment,
    Json,
    Server,
    complete,
    metric,
    prefilled_then_decoded,
    say,
    timed,
    token_ids,
)
from tests_vllm.waiting import SOON_S, eventually, is_idle

ANSWER = 8
# 34 blocks of 30 layers, 3 heads, K and V of 64 floats: vLLM keeps one of them for itself.
SMALL = 34 * BLOCK_TOKENS * 30 * 3 * 2 * 64 * 4
LONG = 15 * BLOCK_TOKENS
# Two long requests have 30 of 33 blocks, and each asks for two more while it is answered.
LONG_ANSWER = BLOCK_TOKENS + 8
REPLICAS = {"prefill-dp0", "prefill-dp1"}


class Engines(NamedTuple):
    """Two replicas behind one port, and two engines that decode; the second prefills too."""

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
        # The last flag lets a prompt in before all of it has room.
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
        say("all are up")
        yield servers


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [1000 + number, *((11 * i + number) % 997 + 500 for i in range(num_tokens - 1))]


def alone(engines: Engines, prompt: list[int], max_tokens: int = ANSWER) -> list[int]:
    """What one engine says by itself."""
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


def test_the_router_says_which_replica_computes(engines: Engines, deployment: Deployment) -> None:
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


def test_a_prefill_that_nobody_knows_is_not_waited_for(engines: Engines) -> None:
    prompt = prompt_of(18, 100)
    own = {"room": "invented", "prefill": "nobody"}
    params = {"do_remote_prefill": True, "kvferry": own}
    began = time.monotonic()
    with timed("an instance that was never there, with fail"), pytest.raises(Asked) as caught:
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
    """Have a prompt computed; what decode is to be asked with."""
    given = {"do_remote_decode": True, "kvferry": own}
    return dict(complete(server, prompt, 1, kv_transfer_params=given)["kv_transfer_params"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decode_that_is_preempted_answers_all_the_same(engines: Engines, side: str) -> None:
    decode: Server = getattr(engines, side)
    prompts = [prompt_of(20 + number, LONG) for number in range(2)]
    before = metric(decode, "vllm:num_preemptions_total")

    # Computed first, so that decode has both at once however fast the transfer is.
    params = [prefilled(engines.prefill, prompt) for prompt in prompts]

    def answered(prompt: list[int], own: Json) -> list[int]:
        return token_ids(complete(decode, prompt, LONG_ANSWER, kv_transfer_params=own))

    with timed("two long requests where one has room"), ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(answered, prompts, params))
    assert metric(decode, "vllm:num_preemptions_total") > before
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert tokens == alone(engines, prompt, LONG_ANSWER)
    all_idle(engines)


def test_a_prefill_that_is_preempted_takes_a_new_room(engines: Engines) -> None:
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


def test_after_a_failure_one_policy_computes_and_the_other_fails(engines: Engines) -> None:
    prompt, another = prompt_of(40, 100), prompt_of(41, 100)
    wrong = [prefilled(engines.prefill, another) for _ in range(2)]
    with timed("another prompt's room, with recompute"):
        answer = complete(engines.left, prompt, ANSWER, kv_transfer_params=wrong[0])
    assert token_ids(answer) == alone(engines, prompt)
    with timed("another prompt's room, with fail"), pytest.raises(Asked) as caught:
        complete(engines.right, prompt, ANSWER, kv_transfer_params=wrong[1])
    assert caught.value.status == 500
    for decode in (engines.left, engines.right):
        assert "content-differs" in decode.log.read_text()
    all_idle(engines)
