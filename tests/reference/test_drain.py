"""Workers of a whole cluster that are told to end: no request is lost, and no stream is torn.

A drained decode worker's streams go on at the other one, token for token.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import aiohttp
import pytest
from reference.clusters import PATIENCE_S, Running, running, wait_until
from reference.working import events

from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROMPT = "The quick brown fox jumps over the lazy dog. "
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Running]:
    # In double precision no token depends on where it is computed.
    side = {"dtype": "float64", "cache_tokens": 16384, "step_tokens": 64}
    fields: dict[str, Any] = {
        "prefill": [{"instances": 2, **side}],
        "decode": [{"page": 16, **side}, {"page": 8, "order": "hnd", **side}],
    }
    with running(models[TinyKind.LLAMA], **fields) as here:
        yield here


@pytest.fixture(autouse=True)
def all_are_back(cluster: Running) -> Iterator[None]:
    cluster.wait_up(*WORKERS)
    yield
    for name in WORKERS:
        if cluster[name].process.poll() is not None:
            cluster[name].start()
            cluster.launch.wait_ready([cluster[name]])


# ---------------------------------------------------------------- requests


class Streamed(NamedTuple):
    """What a client has of its stream, and the longest time between two of its events."""

    text: str
    tokens: list[int]
    finish: str | None
    usage: dict[str, Any] | None
    ids: set[str]
    gap_s: float


def body_of(number: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of one of many kinds of requests."""
    body: dict[str, Any] = {"max_tokens": max_tokens - number, "stream": True, "ignore_eos": True}
    # Bytes at random make characters of several tokens, also broken ones.
    body |= {"temperature": 0} if number % 4 == 0 else {"temperature": 1.3, "seed": number}
    if number % 3 == 0:
        body["return_token_ids"] = True
    if number % 2:
        body["stream_options"] = {"include_usage": True}
    if number % 5 == 1:
        # Its first letter comes often and is held back; the whole never comes.
        body["stop"] = ["e" + 40 * "~", "\u00e9" + 40 * "~"]
    text = f"{number}: {PROMPT * (1 + number % 5)}"
    if number % 4 < 2:
        return "completions", body | {"prompt": text}
    return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}


async def stream(
    http: aiohttp.ClientSession, url: str, number: int, max_tokens: int, begun: asyncio.Queue[int]
) -> Streamed:
    path, body = body_of(number, max_tokens)
    raw, last, gap_s = bytearray(), None, 0.0
    async with http.post(f"{url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        async for data in response.content.iter_any():
            now = time.monotonic()
            if last is None:
                begun.put_nowait(number)
            gap_s, last, raw = max(gap_s, now - (last or now)), now, raw + data
    return streamed(bytes(raw), gap_s)


def streamed(raw: bytes, gap_s: float = 0.0) -> Streamed:
    documents = events(raw)
    usage = [document["usage"] for document in documents if document.get("usage")]
    choices = [choice for document in documents for choice in document["choices"]]
    roles = [choice for choice in choices if choice.get("delta", {}).get("role")]
    assert len(roles) == ("delta" in choices[0])
    return Streamed(
        "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices),
        [token for choice in choices for token in choice.get("token_ids", ())],
        choices[-1]["finish_reason"],
        usage[0] | {"prompt_tokens_details": None} if usage else None,
        {document["id"] for document in documents},
        gap_s,
    )


Meanwhile = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Leave the cluster alone."""


def stream_all(
    cluster: Running, max_tokens: int, meanwhile: Meanwhile, num: int = NUM_STREAMS
) -> list[Streamed]:
    """Stream many answers at once; run ``meanwhile`` when all have begun."""

    async def run() -> list[Streamed]:
        begun: asyncio.Queue[int] = asyncio.Queue()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            asking = [
                asyncio.create_task(stream(http, cluster.url, number, max_tokens, begun))
                for number in range(num)
            ]
            for _ in asking:
                await begun.get()
            await meanwhile()
            return await asyncio.gather(*asking)

    return asyncio.run(run())


def demand_same(answers: list[Streamed], expected: list[Streamed]) -> None:
    for answer, right in zip(answers, expected, strict=True):
        assert answer._replace(ids=right.ids, gap_s=right.gap_s) == right
        assert len(answer.ids) == 1


def metric(cluster: Running, name: str) -> float:
    with urlopen(f"{cluster.url}/metrics", timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def moves(cluster: Running, reason: str) -> float:
    return metric(cluster, f'kvferry_router_move_seconds_count{{reason="{reason}"}}')


def leave_only(cluster: Running, name: str, other: str) -> Callable[[], Awaitable[None]]:
    """Have all streams begin at ``name``; return how to have ``other`` back."""
    signal_to(cluster, other, signal.SIGSTOP)
    wait_until(lambda: not cluster.is_up(other), f"{other} to be down")

    async def back() -> None:
        signal_to(cluster, other, signal.SIGCONT)
        while not cluster.is_up(other):
            await asyncio.sleep(0.02)

    return back


def signal_to(cluster: Running, name: str, number: signal.Signals) -> None:
    cluster[name].process.send_signal(number)


# ---------------------------------------------------------------- tests

MAX_TOKENS = 600


@pytest.fixture(scope="module")
def expected(cluster: Running) -> list[Streamed]:
    return stream_all(cluster, MAX_TOKENS, nothing)


def test_streams_of_a_drained_decode_worker_go_on_at_another(
    cluster: Running, expected: list[Streamed], record_property: Callable[[str, object], None]
) -> None:
    back, before = leave_only(cluster, "decode-0", "decode-1"), moves(cluster, "drain")

    async def drain() -> None:
        await back()
        signal_to(cluster, "decode-0", signal.SIGTERM)

    answers = stream_all(cluster, MAX_TOKENS, drain)
    demand_same(answers, expected)
    assert cluster["decode-0"].process.wait(PATIENCE_S) == 0
    assert moves(cluster, "drain") == before + NUM_STREAMS
    gaps = sorted(answer.gap_s for answer in answers)
    record_property("pause_p50_s", statistics.median(gaps))
    record_property("pause_p99_s", gaps[-1])
    print(f"longest pause of a stream: p50 {statistics.median(gaps):.3f} s, p99 {gaps[-1]:.3f} s")
