"""Workers of a whole cluster that are told to end: no request is lost, and no stream is torn.

A drained decode worker's streams go on at the other one, token for token.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import aiohttp
import pytest
from reference.clusters import NAME, PATIENCE_S, Running, post, running, wait_until
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
def all_are_back(cluster: Running) -> None:
    # A worker that the last test has told to end may still be ending.
    wait_until(lambda: _all_are_up(cluster), f"{WORKERS} to be up")


def _all_are_up(cluster: Running) -> bool:
    """Start the workers that have ended; return whether the router sees all."""
    for name in WORKERS:
        if cluster[name].process.poll() is not None:
            cluster[name].start()
            cluster.launch.wait_ready([cluster[name]])
    return all(map(cluster.is_up, WORKERS))


# ---------------------------------------------------------------- requests


class Streamed(NamedTuple):
    """A client's part of its stream, and the longest time between two of its events."""

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
    http: aiohttp.ClientSession, url: str, request: tuple[str, Any], begun: asyncio.Queue[None]
) -> Streamed:
    path, body = request
    raw, last, gap_s = bytearray(), None, 0.0
    async with http.post(f"{url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        async for data in response.content.iter_any():
            now = time.monotonic()
            if last is None:
                begun.put_nowait(None)
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
    cluster: Running, max_tokens: int, meanwhile: Meanwhile, **more: Any
) -> list[Streamed]:
    """Stream many answers at once; run ``meanwhile`` when all have begun."""

    async def run() -> list[Streamed]:
        begun: asyncio.Queue[None] = asyncio.Queue()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            requests = [body_of(number, max_tokens) for number in range(NUM_STREAMS)]
            asking = [
                asyncio.create_task(stream(http, cluster.url, (path, body | more), begun))
                for path, body in requests
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

MAX_TOKENS = 400


@pytest.fixture(scope="module")
def expected(cluster: Running) -> list[Streamed]:
    """The same answers from workers that stay."""
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
    # On a fast machine some have ended before.
    assert moves(cluster, "drain") >= before + NUM_STREAMS // 2
    assert cluster.health("decode-1")["pulled_tokens"] > 0
    gaps = sorted(answer.gap_s for answer in answers)
    record_property("pause_p50_s", statistics.median(gaps))
    record_property("pause_p99_s", gaps[-1])
    print(f"longest pause of a stream: p50 {statistics.median(gaps):.3f} s, p99 {gaps[-1]:.3f} s")


def test_a_worker_that_is_killed_while_it_drains_loses_no_stream(
    cluster: Running, expected: list[Streamed]
) -> None:
    back = leave_only(cluster, "decode-1", "decode-0")
    drains, failures = moves(cluster, "drain"), moves(cluster, "failure")

    async def drain_and_kill() -> None:
        await back()
        signal_to(cluster, "decode-1", signal.SIGTERM)
        # The first stream has moved, and others pull.
        while moves(cluster, "drain") == drains:
            await asyncio.sleep(0)
        signal_to(cluster, "decode-1", signal.SIGKILL)

    answers = stream_all(cluster, MAX_TOKENS, drain_and_kill)
    demand_same(answers, expected)
    assert cluster["decode-1"].process.wait(PATIENCE_S) == -signal.SIGKILL
    drains, failures = moves(cluster, "drain") - drains, moves(cluster, "failure") - failures
    assert drains + failures >= NUM_STREAMS // 2
    print(f"moved while it drained: {drains:.0f}, after it was killed: {failures:.0f}")


def test_prefill_workers_drain_under_load(cluster: Running) -> None:
    """Each prompt is computed by a prefill worker, so none is lost on the way."""
    url, body = cluster.url, {"max_tokens": 2, "kvferry": {"on_failure": "fail"}}
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        while prefill.poll() is None:
            prompt = f"{len(answers)} {PROMPT * 20}"
            answers.append(post(url, body | {"prompt": prompt}))

    prefill = cluster["prefill-0"].process
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        wait_until(lambda: len(answers) >= 16, "prompts to be answered")
        prefill.send_signal(signal.SIGTERM)
        for one in asking:
            one.result(PATIENCE_S)
    assert prefill.wait() == 0
    assert {status for status, _ in answers} == {200}
    assert {document["kvferry"]["source"] for _, document in answers} == {"transferred"}


def test_without_permission_to_continue_a_killed_worker_tears_its_streams(
    cluster: Running,
) -> None:
    """The streams above are whole because they moved: these may not."""

    async def kill() -> None:
        signal_to(cluster, "decode-0", signal.SIGKILL)

    with pytest.raises(AssertionError, match=r"no longer responds|is gone|ended its response"):
        stream_all(cluster, MAX_TOKENS, kill, kvferry={"on_failure": "fail"})


def test_the_rest_depends_on_every_token_before_it(cluster: Running) -> None:
    """The comparison above would see one wrong or missing token of the history."""
    url = cluster.workers()["decode-0"]["url"]
    body = {"model": NAME, "prompt": PROMPT, "temperature": 1.3, "seed": 1, "ignore_eos": True}
    body |= {"return_token_ids": True, "max_tokens": 60}
    _, whole = post(url, body)
    text, tokens = (whole["choices"][0][key] for key in ("text", "token_ids"))

    def rest(*answered: int, **more: int) -> tuple[str, list[int]]:
        _, document = post(url, body | {"answered_token_ids": answered} | more)
        assert document["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        choice = document["choices"][0]
        return choice["text"], choice["token_ids"]

    for cut in range(1, len(tokens), 7):
        shown, following = rest(*tokens[:cut])
        assert text.endswith(shown)
        assert following == tokens[cut:]
    wrong = [*tokens[:29], (tokens[29] + 1) % 256]
    assert rest(*wrong)[1] != tokens[30:]
    assert rest(*tokens[:29])[1] != tokens[30:]
