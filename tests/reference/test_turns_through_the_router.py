"""Three turns of a conversation through the router, each a request of its own.

A real cluster of processes. Every answer must be, token by token, that of one engine, and from the
second turn on only what the prefill worker lacks may travel to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from reference.clusters import NAME, PATIENCE_S, Running, running, wait_until
from reference.driving import PROMPTS
from reference.working import Alone

from kvferry.reference.models.tiny import TinyKind
from kvferry.router.options import PullOptions, RouterOptions
from kvferry.router.serving import serving

Models = dict[TinyKind, Path]
WORKERS = ("prefill-0", "decode-0", "decode-1")
# 6 layers, K and V, 2 heads of 16 floats.
TOKEN_BYTES = 6 * 2 * 2 * 16 * 4
MAX_TOKENS = 40
FIRST = PROMPTS[2]
# Computing seems expensive, so the router always pulls.
PULL = {"compute_token_s": 1.0}


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Running]:
    fields: dict[str, Any] = {
        "router": {"port": 0, "poll_s": 0.2, "pull": PULL},
        "prefill": [{"tp": 2}],
        "decode": [{"instances": 2, "page": 8}],
    }
    with running(models[TinyKind.QWEN3], **fields) as here:
        yield here


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    return Alone(models)


def ask(url: str, prompt: tuple[int, ...], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The name of the decode worker, and the answer."""
    body = {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = Request(f"{url}/v1/completions", json.dumps(body | fields).encode())
    with urlopen(request, timeout=PATIENCE_S) as response:
        data = response.read()
        decode = response.headers["X-Kvferry-Decode"]
    if "stream" not in fields:
        return decode, json.loads(data)
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return decode, {"choices": [{"token_ids": tokens}], "usage": events[-1]["usage"]}


def tokens_of(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def sent(cluster: Running) -> dict[str, int]:
    """The bytes that each worker has sent, once all are idle."""
    cluster.wait_idle(*WORKERS)
    return {name: sum(cluster.health(name)["carried_bytes"].values()) for name in WORKERS}


def metric(cluster: Running, name: str) -> float:
    with urlopen(f"{cluster.url}/metrics", timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
def test_only_what_is_missing_travels(cluster: Running, alone: Alone, *, stream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    begin = tuple(token ^ stream for token in FIRST)
    _, answer = ask(cluster.url, begin, **fields)
    assert cached(answer) == 0
    one = tokens_of(answer)

    second = (*begin, *one, *PROMPTS[1], *range(64))
    before, pulled_before = (
        sent(cluster),
        metric(cluster, 'kvferry_router_prompt_tokens_total{source="pulled"'),
    )
    _, answer = ask(cluster.url, second, **fields)
    two, after = tokens_of(answer), sent(cluster)
    # Prefill has the first 144 tokens in pages of 16. Decode has all but the last that it
    # generated, 189 in pages of 8: 184, which the chain cuts at 176.
    assert cached(answer) == 176
    pulled = sum(after[name] - before[name] for name in WORKERS[1:])
    assert pulled == (176 - 144) * TOKEN_BYTES
    assert (
        metric(cluster, 'kvferry_router_prompt_tokens_total{source="pulled"') - pulled_before == 32
    )

    # The client removes a part of the second answer, which was its reasoning.
    third = (*second, *two[:23], *two[31:], *PROMPTS[0])
    assert len(second) == 286
    before = after
    _, answer = ask(cluster.url, third, **fields)
    after = sent(cluster)
    # Prefill has 272 tokens. The chain is cut within the second answer, at 304 of 309.
    assert cached(answer) == 304
    pulled = sum(after[name] - before[name] for name in WORKERS[1:])
    assert pulled == (304 - 272) * TOKEN_BYTES
    right = alone(TinyKind.QWEN3, [begin, second, third], max_tokens=MAX_TOKENS)
    assert [list(one), list(two), list(tokens_of(answer))] == right


def test_without_pulls_nothing_travels_from_decode(cluster: Running, alone: Alone) -> None:
    """The negative control: it is the router's holder that has the cache travel."""
    options = RouterOptions(
        port=0,
        discovery=cluster.launch["discovery"].url,
        poll_s=0.2,
        pull=PullOptions(enabled=False),
    )
    begin = tuple(255 - token for token in FIRST)

    async def talk() -> tuple[dict[str, Any], tuple[int, ...], dict[str, Any], int]:
        async with serving(options) as url:
            while len([one for one in await health(url) if one["up"]]) < len(WORKERS):
                await asyncio.sleep(0.05)
            _, first = await asyncio.to_thread(ask, url, begin)
            second = (*begin, *tokens_of(first), *PROMPTS[1])
            before = await asyncio.to_thread(sent, cluster)
            _, answer = await asyncio.to_thread(ask, url, second)
            after = await asyncio.to_thread(sent, cluster)
            return first, second, answer, sum(after[n] - before[n] for n in WORKERS[1:])

    first, second, answer, num_bytes = asyncio.run(talk())
    assert num_bytes == 0
    assert cached(answer) == 144
    assert [list(tokens_of(first)), list(tokens_of(answer))] == alone(
        TinyKind.QWEN3, [begin, second], max_tokens=MAX_TOKENS
    )


async def health(url: str) -> list[dict[str, Any]]:
    def get() -> list[dict[str, Any]]:
        with urlopen(f"{url}/healthz", timeout=PATIENCE_S) as response:
            return list(json.loads(response.read())["workers"])

    return await asyncio.to_thread(get)


def test_a_holder_that_is_killed_between_turns_costs_time_only(
    cluster: Running, alone: Alone
) -> None:
    """Last, because it ends a worker."""
    begin = tuple(token ^ 2 for token in FIRST)
    decode, answer = ask(cluster.url, begin)
    second = (*begin, *tokens_of(answer), *PROMPTS[1])
    holder = cluster[decode].process
    holder.kill()
    holder.wait(PATIENCE_S)
    other, late = ask(cluster.url, second)
    assert other != decode
    assert cached(late) == 144
    assert [list(tokens_of(late))] == alone(TinyKind.QWEN3, [second], max_tokens=MAX_TOKENS)
    wait_until(lambda: not cluster.is_up(decode), "the router to see that the holder is gone")
    # The other one has answered the same conversation meanwhile, and holds it now.
    third = (*second, *tokens_of(late), *PROMPTS[1])
    _, answer = ask(cluster.url, third)
    assert cached(answer) > len(second)
    assert [list(tokens_of(answer))] == alone(TinyKind.QWEN3, [third], max_tokens=MAX_TOKENS)
