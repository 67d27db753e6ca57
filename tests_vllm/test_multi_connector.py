"""kvferry beside a connector that stores prompts, inside vLLM's MultiConnector.

One prefill and one decode have kvferry alone, the others have a store beside it: vLLM's
OffloadingConnector, with host memory for both sides of its copies, and its ExampleConnector, which
loads synchronously from files. At prefill kvferry comes first, at decode the store does, so that it
loads what it has. Resetting vLLM's prefix caches leaves only the stores to know a prompt.
"""

from __future__ import annotations

import http.client
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import (
    CACHE_BYTES,
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
from tests_vllm.waiting import eventually, is_idle

ANSWER, LONG_ANSWER = 12, 250
# 17 and 7 blocks; the small caches have room for 34.
LONG, SHORT = 540, 200
SMALL = 34 * 32 * 46_080
BYTES_SENT, ROOMS_DONE = "vllm:kvferry_bytes_sent_total", "vllm:kvferry_rooms_done_total"
LOADED = "vllm:external_prefix_cache_hits_total"
PREEMPTED = "vllm:num_preemptions_total"


class Engines(NamedTuple):
    """Engines with kvferry alone, and with a store beside it."""

    prefill: Server
    stored_prefill: Server
    decode: Server
    stored_decode: Server


PAIRS = {
    "prefill": ("stored_prefill", "decode"),
    "decode": ("prefill", "stored_decode"),
    "both": ("stored_prefill", "stored_decode"),
}


def store(kind: str, folder: Path) -> Json:
    extra: Json = {"shared_storage_path": str(folder)}
    if kind == "OffloadingConnector":
        extra = {
            "cpu_bytes_to_use": CACHE_BYTES,
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "tests_vllm.host_offloading",
        }
    return {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def nested(ferry: Json, *connectors: Json) -> Json:
    """Return a MultiConnector's configuration, for the same role and policy as kvferry's."""
    outer = {name: ferry[name] for name in ("kv_role", "kv_load_failure_policy")}
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    } | outer


@pytest.fixture(scope="module", params=["OffloadingConnector", "ExampleConnector"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Deployment() as deployment, timed(f"two prefills and two decodes, half with {kind}"):
        servers = []
        for name, role in zip(
            Engines._fields, ("kv_producer",) * 2 + ("kv_consumer",) * 2, strict=True
        ):
            transfer = deployment.connector(role, name, "recompute")
            if name.startswith("stored"):
                beside = store(kind, tmp_path_factory.mktemp(name))
                order = (transfer, beside) if role == "kv_producer" else (beside, transfer)
                transfer = nested(transfer, *order)
            # ExampleConnector stores no more of a prompt than its first chunk.
            chunk = 256 if kind == "OffloadingConnector" else 1024
            more = f"--enable-prefix-caching --max-num-batched-tokens {chunk}"
            more += " --no-scheduler-reserve-full-isl --max-model-len 1024"
            servers.append(
                deployment.vllm(
                    *(name, plain()),
                    transfer=transfer,
                    cache_bytes=SMALL,
                    more=more,
                    VLLM_SERVER_DEV_MODE="1",
                )
            )
        for server in servers:
            server.wait_until_up()
        log("all are up")
        yield Engines(*servers)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, engines: Engines) -> tuple[Server, Server]:
    prefill, decode = PAIRS[request.param]
    return getattr(engines, prefill), getattr(engines, decode)


def prompt_of(num_tokens: int) -> list[int]:
    """Return random token ids."""
    return [300 + secrets.randbelow(30_000) for _ in range(num_tokens)]


def alone(engines: Engines, prompt: list[int], max_tokens: int = ANSWER) -> list[int]:
    """Return the answer of a prefill without store and prefix cache."""
    reset(engines.prefill)
    return token_ids(complete(engines.prefill, prompt, max_tokens))


def reset(*servers: Server) -> None:
    """Empty vLLM's own prefix caches."""
    for server in servers:
        eventually(lambda server=server: is_idle(server), "blocks are released")  # type: ignore[misc]
        ask(server.url + "/reset_prefix_cache", {})


def all_idle(engines: Engines) -> None:
    eventually(lambda: all(map(is_idle, engines)), "blocks are released")


def test_cold_and_warm_prompts(engines: Engines, pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    prompt = prompt_of(SHORT)
    expected = alone(engines, prompt)
    reset(*engines)
    sent, loaded = metric(prefill, BYTES_SENT), metric(prefill, LOADED)
    with timed(f"a cold prompt from {prefill.name} to {decode.name}"):
        answer = prefilled_then_decoded(prefill, decode, prompt, ANSWER)
    assert token_ids(answer) == expected
    eventually(lambda: metric(prefill, BYTES_SENT) > sent, "the room is counted")
    assert metric(prefill, LOADED) == loaded

    reset(*engines)
    sent, done = metric(prefill, BYTES_SENT), metric(prefill, ROOMS_DONE)
    received, loaded_there = metric(decode, ROOMS_DONE), metric(decode, LOADED)
    with timed("the same prompt, warm"):
        answer = prefilled_then_decoded(prefill, decode, prompt, ANSWER)
    assert token_ids(answer) == expected
    eventually(lambda: metric(prefill, ROOMS_DONE) > done, "the room is counted")
    if prefill is engines.stored_prefill:
        assert metric(prefill, LOADED) > loaded
    if decode is engines.stored_decode:
        # The store loads, and the room ends without data.
        assert metric(decode, LOADED) > loaded_there
        assert (metric(prefill, BYTES_SENT), metric(decode, ROOMS_DONE)) == (sent, received)
    else:
        assert metric(prefill, BYTES_SENT) > sent
    all_idle(engines)


def test_stored_room_is_what_was_carried(engines: Engines) -> None:
    """The store at decode keeps what kvferry has filled, so a wrong block would stay wrong."""
    prompt = prompt_of(SHORT)
    expected = alone(engines, prompt)
    prefilled_then_decoded(engines.prefill, engines.stored_decode, prompt, ANSWER)
    for _ in range(2):
        reset(engines.stored_decode)
        loaded = metric(engines.stored_decode, LOADED)
        assert token_ids(complete(engines.stored_decode, prompt, ANSWER)) == expected
        assert metric(engines.stored_decode, LOADED) > loaded


def test_concurrent_prompts_with_a_shared_beginning(
    engines: Engines, pair: tuple[Server, Server]
) -> None:
    begin = prompt_of(SHORT)
    prompts = [begin + prompt_of(20 + 30 * number) for number in range(4)]
    expected = [alone(engines, prompt) for prompt in prompts]
    for state in ("cold", "warm"):
        reset(*engines)
        with timed(f"four {state} prompts at once"), ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda prompt: prefilled_then_decoded(*pair, prompt, ANSWER), prompts)
            )
        assert list(map(token_ids, answers)) == expected
        all_idle(engines)


def check_preemption(kind: str) -> None:
    if kind == "ExampleConnector":
        pytest.skip("a preempted request ends the engine: it looks for a file that it never wrote")


def test_preempted_decode(engines: Engines, kind: str) -> None:
    check_preemption(kind)
    prompts = [prompt_of(LONG - 40) for _ in range(2)]
    expected = [alone(engines, prompt, LONG_ANSWER) for prompt in prompts]
    reset(*engines)
    before = metric(engines.stored_decode, PREEMPTED)

    def answered(prompt: list[int], params: Json) -> list[int]:
        answer = complete(engines.stored_decode, prompt, LONG_ANSWER, kv_transfer_params=params)
        return token_ids(answer)

    params = [prefilled(engines.stored_prefill, prompt) for prompt in prompts]
    with timed("two long requests where one has room"), ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(answered, prompts, params))
    assert metric(engines.stored_decode, PREEMPTED) > before
    assert answers == expected
    all_idle(engines)


def test_preempted_prefill(engines: Engines, kind: str) -> None:
    check_preemption(kind)
    mine, other = prompt_of(LONG + 440), prompt_of(LONG)
    expected = alone(engines, mine), alone(engines, other, LONG_ANSWER)
    reset(*engines)
    prefill = engines.stored_prefill
    before = metric(prefill, PREEMPTED)
    with timed("a prefill has no room for its last chunk"), ThreadPoolExecutor(1) as pool:
        held = pool.submit(complete, prefill, other, LONG_ANSWER)
        eventually(lambda: metric(prefill, "vllm:num_requests_running") > 0, "it runs")
        answer = prefilled_then_decoded(prefill, engines.stored_decode, mine, ANSWER)
        found = token_ids(answer), token_ids(held.result())
    assert metric(prefill, PREEMPTED) > before
    assert found == expected
    all_idle(engines)


def prefilled(server: Server, prompt: list[int]) -> Json:
    given = {"do_remote_decode": True}
    return dict(complete(server, prompt, 1, kv_transfer_params=given)["kv_transfer_params"])


def leave_early(server: Server, prompt: list[int], after_s: float, params: Json) -> None:
    """Send a request and disconnect before the answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 400, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    headers = {"Content-Type": "application/json"}
    body["kv_transfer_params"] = params
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    threading.Event().wait(after_s)
    connection.close()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_aborts_free_all_blocks(
    engines: Engines, pair: tuple[Server, Server], *, warm: bool
) -> None:
    """Clients leave while prefill computes, while decode waits, and while it answers."""
    prefill, decode = pair
    prompts = [prompt_of(LONG) for _ in range(3)]
    expected = [alone(engines, prompt) for prompt in prompts]
    reset(*engines)
    if warm:
        for prompt in prompts:
            prefilled_then_decoded(prefill, decode, prompt, 1)
            reset(*engines)
    with timed("clients leave at prefill"):
        for prompt, after_s in zip(prompts, (0.05, 0.2, 0.5), strict=True):
            leave_early(prefill, prompt, after_s, {"do_remote_decode": True})
        all_idle(engines)
    with timed("clients leave at decode, which waits for a room"):
        own = {"room": secrets.token_hex(8)}
        waits = {"do_remote_prefill": True, "kvferry": own | {"prefill": prefill.name}}
        leave_early(decode, prompts[0], 0.3, waits)
        asked = {"do_remote_decode": True, "kvferry": own}
        complete(prefill, prompts[0], 1, kv_transfer_params=asked)
        all_idle(engines)
    with timed("clients leave at decode, which has the room"):
        for prompt, after_s in zip(prompts, (0.05, 0.2, 0.5), strict=True):
            leave_early(decode, prompt, after_s, prefilled(prefill, prompt))
        all_idle(engines)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert token_ids(prefilled_then_decoded(prefill, decode, prompt, ANSWER)) == tokens
    all_idle(engines)
