"""One decode with two prefills, on one rank and on three, and the policy "recompute".

SmolLM2's 3 KV heads give each rank of TP3 one head. The answers are compared with those of a single
engine without prefix caching, which computes each prompt afterwards.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import (
    BLOCK_TOKENS,
    Deployment,
    Json,
    Server,
    ask,
    complete,
    log,
    metric,
    prefilled_then_decoded,
    timed,
    token_ids,
)
from tests_vllm.waiting import SOON_S, eventually, is_idle

ANSWER = 12
LONG = "The ferry carries apples, pears, plums, quinces and figs over the river. " * 40


class Engines(NamedTuple):
    """Two prefills, one decode and a router."""

    one: Server
    three: Server
    decode: Server
    router: Server


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Deployment() as deployment, timed("vLLM prefill TP1 and TP3, decode TP1, and a router"):
        alone = "--no-enable-prefix-caching --max-num-batched-tokens 256"
        servers = [
            deployment.vllm(
                *(name, plain()),
                tp=tp,
                transfer=deployment.connector(role, name, "recompute", silence_s=8),
                more=more,
            )
            for name, tp, role, more in (
                ("one", 1, "kv_producer", alone),
                ("three", 3, "kv_producer", alone),
                ("decode", 1, "kv_consumer", "--enable-prefix-caching"),
            )
        ]
        for server in servers:
            server.wait_until_up()
        one, three, decode = servers
        router = deployment.router([one, three], decode)
        log("all are up")
        yield Engines(one, three, decode, router)


def alone(engines: Engines, prompt: str) -> list[int]:
    """Return the answer of a single engine."""
    return token_ids(complete(engines.one, prompt, ANSWER))


# ---------------------------------------------------------------- success


@pytest.mark.parametrize("size", ["one", "three"])
@pytest.mark.parametrize("prompt", ["A ferry is", f"{LONG} In short,"], ids=["short", "chunks"])
def test_the_answer_is_that_of_one_engine(engines: Engines, size: str, prompt: str) -> None:
    prefill, prompt = getattr(engines, size), f"({size}) {prompt}"
    with timed(f"prefill {size}, then decode, {len(prompt)} characters"):
        answer = prefilled_then_decoded(prefill, engines.decode, prompt, ANSWER)
    assert token_ids(answer) == alone(engines, prompt)
    eventually(lambda: is_idle(prefill) and is_idle(engines.decode), "blocks are released")


def test_only_missing_tokens_are_transferred(engines: Engines) -> None:
    begin = "Shared: " + "a river, a bridge, a ferry, " * 30
    first, second = (sent_for(engines, begin + end) for end in ("so the first", "so the second"))
    log(f"sent {first:.0f} bytes, then {second:.0f}")
    assert second < first / 3


def sent_for(engines: Engines, prompt: str) -> float:
    """Return the bytes transferred for a prompt, once its room is counted."""
    rooms, sent = "vllm:kvferry_rooms_done_total", "vllm:kvferry_bytes_sent_total"
    before = metric(engines.one, rooms), metric(engines.one, sent)
    answer = prefilled_then_decoded(engines.one, engines.decode, prompt, ANSWER)
    eventually(lambda: metric(engines.one, rooms) > before[0], "the room is counted")
    carried = metric(engines.one, sent) - before[1]
    assert token_ids(answer) == alone(engines, prompt)
    return carried


def test_sixteen_concurrent_requests_through_the_router(engines: Engines) -> None:
    prompts = [f"Number {i}: {LONG[: 40 * i]} and so" for i in range(16)]
    with timed("16 requests at once, both workers at once"), ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: complete(engines.router, prompt, ANSWER), prompts))
    received = metric(engines.decode, "vllm:kvferry_rooms_done_total")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert token_ids(answer) == alone(engines, prompt), prompt[:20]
    assert received >= 16
    assert metric(engines.decode, "vllm:kvferry_rooms_failed_total") == 0
    eventually(lambda: all(map(is_idle, engines[:3])), "blocks are released")


def test_longer_prompt_at_decode(engines: Engines) -> None:
    ids = ask(engines.one.url + "/tokenize", {"model": "m", "prompt": "One more:" + LONG})
    tokens = ids["tokens"][: 4 * BLOCK_TOKENS + 1]
    given = {"do_remote_decode": True}
    first = complete(engines.three, tokens[:-1], 1, kv_transfer_params=given)
    params = first["kv_transfer_params"]
    assert params["kvferry"]["tokens"] == 4 * BLOCK_TOKENS
    answer = complete(engines.decode, tokens, ANSWER, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(complete(engines.one, tokens, ANSWER))


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "own",
    [
        None,
        [],
        {"room": -1, "prefill": "one"},
        {"room": {"a": 1}},
        {"room": 1, "prefill": "x" * 999},
    ],
)
def test_malformed_parameters_are_ignored(engines: Engines, own: object) -> None:
    params = {"do_remote_prefill": True, "kvferry": own}
    answer = complete(engines.decode, "Nonsense is", ANSWER, kv_transfer_params=params)
    assert token_ids(answer) == alone(engines, "Nonsense is")


def leave_early(server: Server, prompt: str, **more: object) -> None:
    """Send a request and disconnect before the answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 500, "temperature": 0} | more
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    threading.Event().wait(0.4)
    connection.close()


def test_disconnected_client_frees_both_sides(engines: Engines) -> None:
    with timed("clients leave in the middle"):
        for number in range(4):
            leave_early(engines.router, f"Leaving {number}: {LONG}", stream=number % 2 == 0)
        eventually(lambda: all(map(is_idle, engines[:3])), "blocks are released")
    prompt = "After they have left,"
    assert token_ids(complete(engines.router, prompt, ANSWER)) == alone(engines, prompt)


def both_at_once(
    pool: ThreadPoolExecutor, prefill: Server, decode: Server, prompt: str, room: str
) -> tuple[Future[Json], Future[Json]]:
    """Send a request to both sides in parallel, without a router."""
    own: dict[str, Any] = {"room": room}
    first = {"do_remote_decode": True, "kvferry": own}
    second = {"do_remote_prefill": True, "kvferry": own | {"prefill": prefill.name}}
    return (
        pool.submit(complete, prefill, prompt, 1, kv_transfer_params=first),
        pool.submit(complete, decode, prompt, ANSWER, kv_transfer_params=second),
    )


def test_stopped_decode_does_not_stop_others(engines: Engines) -> None:
    prompt = f"Stopped: {LONG}"
    with timed("decode is stopped for 12 s"), ThreadPoolExecutor(2) as pool:
        first, second = both_at_once(pool, engines.one, engines.decode, prompt, "stopped")
        threading.Event().wait(0.3)
        engines.decode.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            other = "Meanwhile, the ferry"
            assert token_ids(complete(engines.one, other, ANSWER)) == alone(engines, other)
            first.result(SOON_S)
            threading.Event().wait(max(0.0, 12 - (time.monotonic() - began)))
        finally:
            engines.decode.signal(signal.SIGCONT)
        answer = second.result(SOON_S)
    assert token_ids(answer) == alone(engines, prompt)
    eventually(lambda: all(map(is_idle, engines[:3])), "blocks are released")


def test_killed_prefill_is_recomputed(engines: Engines) -> None:
    prompt = f"Killed: {LONG}"
    with timed("prefill is killed in the middle"), ThreadPoolExecutor(2) as pool:
        first, second = both_at_once(pool, engines.three, engines.decode, prompt, "killed")
        threading.Event().wait(0.6)
        engines.three.signal(signal.SIGKILL)
        answer = second.result(SOON_S)
        assert first.exception(SOON_S) is not None
    assert token_ids(answer) == alone(engines, prompt)
    assert metric(engines.decode, "vllm:kvferry_rooms_failed_total") > 0
    eventually(lambda: is_idle(engines.decode), "blocks are released")
