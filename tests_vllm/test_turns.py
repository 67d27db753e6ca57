"""Turns of a conversation at engines that pull each other's prefix caches, TP1 and TP2.

Each answer is compared with that of one engine that computes the whole prompt: a cache salt of its
own keeps vLLM from using what is cached.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests_vllm.models import padded
from tests_vllm.servers import (
    BLOCK_TOKENS,
    SKIPPED,
    Deployment,
    Json,
    Server,
    complete,
    log,
    metric,
    timed,
    token_ids,
)
from tests_vllm.waiting import eventually, is_idle

ANSWER = 60
# Layers, KV heads, K and V of 64 floats.
TOKEN_BYTES = 30 * 4 * 2 * 64 * 4
SENT = "vllm:kvferry_bytes_sent_total"


class Engines(NamedTuple):
    """An engine on one rank and one on two. Each prefills, decodes, pulls and is pulled from."""

    one: Server
    two: Server


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as here:
        yield here


@pytest.fixture(scope="module")
def engines(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    model: Path = padded(tmp_path_factory.mktemp("padded"))
    more = "--enable-prefix-caching --max-num-batched-tokens 256 --enable-prompt-tokens-details"
    with timed("vLLM TP1 and TP2, each with both roles"):
        found = []
        for name, tp in (("one", 1), ("two", 2)):
            transfer = deployment.connector("kv_both", name, silence_s=8, pull_deadline_s=30) | {
                "kv_connector": "SkippingConnector",
                "kv_connector_module_path": "tests_vllm.skipping",
            }
            found.append(deployment.vllm(name, model, tp=tp, transfer=transfer, more=more))
        for server in found:
            server.wait_until_up()
    return Engines(*found)


def prompt_of(number: int, length: int = 70) -> list[int]:
    """Return token ids with a beginning of their own."""
    return [1000 + number, *((7 * i + number) % 997 + 500 for i in range(length - 1))]


def answered(server: Server, prompt: list[int], holder: str | None = None) -> Json:
    """Return an answer of full length, after a pull if a holder is given."""
    more: Json = {"ignore_eos": True}
    if holder is not None:
        more["kv_transfer_params"] = {"kvferry": {"holder": holder}}
    return complete(server, prompt, ANSWER, **more)


def alone(server: Server, prompt: list[int]) -> list[int]:
    """Return the answer of one engine that computes the whole prompt."""
    answer = complete(server, prompt, ANSWER, ignore_eos=True, cache_salt=secrets.token_hex(8))
    assert cached(answer) == 0
    return token_ids(answer)


def cached(answer: Json) -> int:
    """Return the tokens that vLLM reports as not computed."""
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


class SentTokens:
    """Tokens that a server has sent since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = metric(server, SENT)

    def become(self, num_tokens: int) -> None:
        expected = self._before + num_tokens * TOKEN_BYTES
        eventually(lambda: metric(self._server, SENT) >= expected, "the bytes are counted")
        assert metric(self._server, SENT) == expected


@pytest.mark.parametrize("length", [70, 600], ids=["short", "chunks"])
def test_three_turns_compute_only_what_no_instance_has(engines: Engines, length: int) -> None:
    one, two = engines
    first = prompt_of(length, length)
    history = first + token_ids(answered(one, first))
    # The second turn is at the other engine, which has nothing yet. The answer's last token has
    # no entry, and the cache ends with a whole block.
    sent, have = SentTokens(one), whole_blocks(len(history) - 1)
    second = [*history, *range(700, 740)]
    with timed("turn 2 at TP2, from TP1"):
        answer = answered(two, second, "one")
    assert cached(answer) == have
    sent.become(have)
    assert token_ids(answer) == alone(one, second)
    # The third turn is at the first engine again, and the client has removed a part of the last
    # answer, which may repeat itself.
    last = token_ids(answer)
    third = [*second, *last[:33], *last[46:], 800, 801]
    pairs = enumerate(zip([*second, *last], third, strict=False))
    num_common = next(at for at, (before, now) in pairs if before != now)
    assert len(second) + 33 <= num_common < len(second) + 46
    sent, common = SentTokens(two), whole_blocks(num_common)
    with timed("turn 3 at TP1, from TP2"):
        answer = answered(one, third, "two")
    assert cached(answer) == common
    sent.become(common - have)
    assert token_ids(answer) == alone(two, third)
    eventually(lambda: is_idle(one) and is_idle(two), "blocks are released")


def test_prefill_pulls_what_decode_has_generated(engines: Engines) -> None:
    """As the router sends it: the next prefill pulls from decode, and sends decode the rest."""
    decode, prefill = engines
    own: Json = {"room": "turn-1"}
    params: Json = {"do_remote_decode": True, "kvferry": own}
    first = prompt_of(3)
    given = complete(prefill, first, 1, kv_transfer_params=params)["kv_transfer_params"]
    answer = complete(decode, first, ANSWER, ignore_eos=True, kv_transfer_params=given)
    second = [*first, *token_ids(answer), *range(900, 950)]
    from_decode, from_prefill = SentTokens(decode), SentTokens(prefill)
    params = {"do_remote_decode": True, "kvferry": {"room": "turn-2", "holder": decode.name}}
    with timed("the next turn: decode to prefill, and back"):
        given = complete(prefill, second, 1, kv_transfer_params=params)["kv_transfer_params"]
        answer = complete(decode, second, ANSWER, ignore_eos=True, kv_transfer_params=given)
    have = whole_blocks(len(first) + ANSWER - 1)
    from_decode.become(have - whole_blocks(len(first)))
    from_prefill.become(len(second) - have)
    assert token_ids(answer) == alone(prefill, second)


def test_three_turns_through_the_router(deployment: Deployment, engines: Engines) -> None:
    """The router finds by itself that decode has the last answer, which is worth a pull."""
    decode, prefill = engines
    router, length = deployment.router([prefill], decode), 256

    def turn(prompt: list[int]) -> list[int]:
        answer = token_ids(complete(router, prompt, length, ignore_eos=True))
        whole = complete(prefill, prompt, length, ignore_eos=True, cache_salt=secrets.token_hex(8))
        assert answer == token_ids(whole)
        return answer

    first = prompt_of(50, 128)
    second = [*first, *turn(first), *range(900, 940)]
    sent = SentTokens(decode)
    with timed("turn 2"):
        last = turn(second)
    sent.become(whole_blocks(len(first) + length - 1) - whole_blocks(len(first)))
    # The client has removed a part of the last answer, which may repeat itself.
    third = [*second, *last[:100], *last[150:], 800, 801]
    pairs = enumerate(zip([*second, *last], third, strict=False))
    num_common = next(at for at, (before, now) in pairs if before != now)
    assert len(second) + 100 <= num_common < len(second) + 150
    sent = SentTokens(decode)
    with timed("turn 3"):
        turn(third)
    sent.become(whole_blocks(num_common) - whole_blocks(len(second)))
    eventually(lambda: is_idle(prefill) and is_idle(decode), "blocks are released")


def test_a_pull_that_skips_the_copy_changes_the_answer(engines: Engines) -> None:
    prompt = prompt_of(4, 200)
    assert token_ids(answered(engines.two, prompt, SKIPPED)) != alone(engines.two, prompt)


def test_pulls_in_both_directions_at_once(engines: Engines) -> None:
    one, two = engines
    prompts = [prompt_of(10 + i, 60 + 20 * i) for i in range(6)]
    places = [(one, two) if i % 2 else (two, one) for i in range(6)]
    with timed("6 pulls at once"), ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: answered(places[i][0], prompts[i]), range(6)))
        answers = list(
            pool.map(
                lambda i: answered(places[i][1], [*prompts[i], 5, 6], places[i][0].name), range(6)
            )
        )
    assert [cached(each) for each in answers] == [whole_blocks(len(each)) for each in prompts]
    for (there, _), prompt, answer in zip(places, prompts, answers, strict=True):
        assert token_ids(answer) == alone(there, [*prompt, 5, 6])
    eventually(lambda: is_idle(one) and is_idle(two), "blocks are released")


@pytest.mark.parametrize("holder", ["two", "nobody"], ids=["has nothing", "is unknown"])
def test_without_a_holder_the_prompt_is_computed(engines: Engines, holder: str) -> None:
    prompt = prompt_of(30 + len(holder))
    answer = answered(engines.one, prompt, holder)
    assert cached(answer) == 0
    assert token_ids(answer) == alone(engines.one, prompt)


def test_a_killed_holder_is_not_waited_for(engines: Engines) -> None:
    one, two = engines
    first = prompt_of(9)
    second = [*first, *token_ids(answered(one, first)), 5]
    one.signal(signal.SIGKILL)
    began = time.monotonic()
    answer = answered(two, second, "one")
    log(f"the prompt is computed after {time.monotonic() - began:.1f} s")
    assert cached(answer) == 0
    assert token_ids(answer) == alone(two, second)
    eventually(lambda: is_idle(two), "blocks are released")
