"""Ending a server under load with SIGTERM and vLLM's ``--shutdown-timeout``.

The engine answers what it has accepted, and holds the blocks of finished prompts until decode has
them, before its endpoints end.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import (
    CACHE_BYTES,
    Deployment,
    Json,
    Server,
    complete,
    log,
    metric,
    timed,
    token_ids,
)
from tests_vllm.waiting import SOON_S, eventually, is_idle

ANSWER = 12
STATES = ("running", "waiting")
DRAIN_S = 60
# Long enough for the engine to compute for seconds.
TOKENS = 1500


class Engines(NamedTuple):
    """Two prefills, of which the first will be ended, and a decode, which will be ended, too."""

    first: Server
    last: Server
    decode: Server


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Deployment() as deployment, timed("two prefills and a decode"):
        servers = [
            deployment.vllm(
                *(name, plain()),
                transfer=deployment.connector(
                    "kv_consumer" if "decode" in name else "kv_producer", name
                ),
                cache_bytes=3 * CACHE_BYTES,
                more=f"--no-enable-prefix-caching --shutdown-timeout {DRAIN_S}",
            )
            for name in Engines._fields
        ]
        for server in servers:
            server.wait_until_up()
        log("all are up")
        yield Engines(*servers)


def prompt_of(number: int, num_tokens: int = TOKENS) -> list[int]:
    return [1000 + number, *((11 * i + number) % 997 + 500 for i in range(num_tokens))]


def prefilled(server: Server, prompt: list[int]) -> Json:
    given = {"do_remote_decode": True}
    return dict(complete(server, prompt, 1, kv_transfer_params=given)["kv_transfer_params"])


def has_ended(server: Server) -> bool:
    return server.process.poll() is not None


def test_prefill_ends_after_its_prompts_were_carried(engines: Engines) -> None:
    """The terminated prefill computes prompts and holds others; both are carried to decode."""
    held = [prompt_of(number) for number in range(3)]
    params = [prefilled(engines.first, prompt) for prompt in held]
    running = [prompt_of(10 + number) for number in range(4)]
    with timed("a prefill with open rooms is terminated"), ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(prefilled, engines.first, prompt) for prompt in running]
        eventually(
            # vLLM reports after each step, the first of which takes a second.
            lambda: sum(metric(engines.first, f"vllm:num_requests_{s}") for s in STATES) >= 2,
            "prompts are being computed",
        )
        engines.first.process.terminate()
        other = pool.submit(prefilled, engines.last, prompt_of(20))
        params += [one.result(SOON_S) for one in asked]
        assert not has_ended(engines.first)
        prompts = [*held, *running, prompt_of(20)]
        params.append(other.result(SOON_S))
        decoded = pool.map(
            lambda prompt, own: complete(engines.decode, prompt, ANSWER, kv_transfer_params=own),
            *(prompts, params),
        )
        answers = list(map(token_ids, decoded))
        engines.first.process.wait(SOON_S)
    assert answers == [token_ids(complete(engines.last, prompt, ANSWER)) for prompt in prompts]
    assert metric(engines.decode, "vllm:kvferry_rooms_failed_total") == 0
    assert metric(engines.decode, "vllm:kvferry_rooms_done_total") == len(prompts)
    eventually(lambda: is_idle(engines.last), "blocks are released")


def test_decode_ends_after_it_has_answered(engines: Engines) -> None:
    prompts = [prompt_of(30 + number) for number in range(4)]
    params = [prefilled(engines.last, prompt) for prompt in prompts]
    before = metric(engines.decode, "vllm:kvferry_rooms_done_total")
    with timed("a decode that receives is terminated"), ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(complete, engines.decode, prompt, 60, kv_transfer_params=own)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        eventually(
            lambda: metric(engines.decode, "vllm:kvferry_rooms_done_total") > before,
            "it receives",
        )
        engines.decode.process.terminate()
        answers = [token_ids(one.result(SOON_S)) for one in asked]
        engines.decode.process.wait(SOON_S)
    assert answers == [token_ids(complete(engines.last, prompt, 60)) for prompt in prompts]
    eventually(lambda: is_idle(engines.last), "blocks are released")
