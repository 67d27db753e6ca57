"""Window layers beside full-attention layers, with vLLM's hybrid allocator; TP2→1 and TP1→2.

Every other layer keeps 64 tokens, and vLLM reuses the blocks before them during prefill. Prompts
end at and next to block boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests_vllm.models import WINDOW, padded
from tests_vllm.servers import (
    BLOCK_TOKENS,
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
LENGTHS = (1, 20, WINDOW, 3 * BLOCK_TOKENS - 1, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1, 333)
LAYERS, HEADS, CONTENT_BYTES = 30, 4, 2 * 64 * 4


class Engines(NamedTuple):
    """An engine on two ranks, and one on one rank with prefix caching."""

    two: Server
    one: Server


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = padded(tmp_path_factory.mktemp("windows"), windows=True)
    with Deployment() as deployment, timed("vLLM TP2 and TP1, every other layer a window"):
        more = "--max-num-batched-tokens 256"
        servers = Engines(
            deployment.vllm(
                *("two", model),
                tp=2,
                transfer=deployment.connector("kv_both", "two"),
                more=f"{more} --no-enable-prefix-caching",
            ),
            deployment.vllm(
                *("one", model),
                transfer=deployment.connector("kv_both", "one", "recompute"),
                more=f"{more} --enable-prefix-caching",
            ),
        )
        for server in servers:
            server.wait_until_up()
        log("both are up")
        yield servers


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """Return token ids with a unique beginning."""
    return [1000 + number, *((13 * i + 5 * number) % 997 + 500 for i in range(num_tokens - 1))]


def alone(engines: Engines, prompt: list[int]) -> list[int]:
    """Return the answer of the engine without prefix caching."""
    return token_ids(complete(engines.two, prompt, ANSWER))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("sizes", ["2 to 1", "1 to 2"])
def test_the_answer_is_that_of_one_engine(engines: Engines, sizes: str, num_tokens: int) -> None:
    prefill, decode = engines if sizes == "2 to 1" else engines[::-1]
    prompt = prompt_of(10 * num_tokens + (sizes == "2 to 1"), num_tokens)
    with timed(f"TP{sizes.replace('to', '→')}, {num_tokens} tokens"):
        answer = prefilled_then_decoded(prefill, decode, prompt, ANSWER)
    assert token_ids(answer) == alone(engines, prompt)


def test_only_the_window_is_transferred(engines: Engines) -> None:
    prompt = prompt_of(7, 16 * BLOCK_TOKENS)
    rooms, sent = "vllm:kvferry_rooms_done_total", "vllm:kvferry_bytes_sent_total"
    before = metric(engines.one, rooms), metric(engines.one, sent)
    answer = prefilled_then_decoded(engines.one, engines.two, prompt, ANSWER)
    assert token_ids(answer) == alone(engines, prompt)
    eventually(lambda: metric(engines.one, rooms) > before[0], "the room is counted")
    token_bytes = LAYERS // 2 * HEADS * CONTENT_BYTES
    # Decode computes the last token, whose window reaches back to the 63 tokens before it.
    num_tokens = len(prompt) - 1 + WINDOW - 1
    assert metric(engines.one, sent) - before[1] == num_tokens * token_bytes


def test_only_missing_tokens_are_transferred(engines: Engines) -> None:
    begin = prompt_of(8, 200)
    for end in ([901, 902, 903], [911, 912, 913], [911, 912, 914]):
        prompt = begin + end
        with timed("a prompt whose beginning decode may have"):
            answer = prefilled_then_decoded(engines.two, engines.one, prompt, ANSWER)
        assert token_ids(answer) == alone(engines, prompt)
    assert metric(engines.one, "vllm:kvferry_rooms_failed_total") == 0


def test_concurrent_requests(engines: Engines) -> None:
    prompts = [prompt_of(60 + number, 90 + 35 * number) for number in range(6)]

    def answered(prompt: list[int]) -> list[int]:
        answer = prefilled_then_decoded(engines.two, engines.one, prompt, ANSWER)
        return token_ids(answer)

    with timed("6 requests at once"), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(answered, prompts))
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
        answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=second)
        computed.result()
    assert token_ids(answer) == alone(engines, prompt)


def test_failure_under_both_policies(engines: Engines) -> None:
    prompt, another = prompt_of(11, 150), prompt_of(12, 150)
    given = {"do_remote_decode": True}
    wrong = complete(engines.two, another, 1, kv_transfer_params=given)["kv_transfer_params"]
    answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=wrong)
    assert token_ids(answer) == alone(engines, prompt)
    wrong = complete(engines.one, another, 1, kv_transfer_params=given)["kv_transfer_params"]
    with pytest.raises(HttpError) as caught:
        complete(engines.two, prompt, ANSWER, kv_transfer_params=wrong)
    assert caught.value.status == 500
    eventually(lambda: all(map(is_idle, engines)), "blocks are released")
