"""The case of vLLM pairs under load: first tokens and throughput against concurrency.

Every pair is asked in turn, as vLLM's own proxies do: prefill, and then decode with its answer. The
ways take turns at every level. Under load the tokens of a bfloat16 model depend on its batches, so
an answer counts if it is whole; the tokens are compared where requests come one at a time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from gpu_engines.checklist import eventually, expect
from gpu_engines.client import Json, metric
from gpu_engines.servers import Server, say
from gpu_engines.vllm_servers import COMPLETIONS, PROXY, ROOMS_DONE, body, prompt

if TYPE_CHECKING:
    from gpu_engines.vllm_cases import VllmRun

TOKENS = 100
DEADLINE_S = 120.0
# Requests at each level: this many rounds, within the limits.
ROUNDS, LEAST, MOST = 2, 8, 256
TP1, TP2 = "TP1→1", "TP2→1"
# Ranks that share the GPU compute slowly, because their collectives go through the host.
SHARED_LENGTH, SHARED_LEVEL = 1000, 64


class LoadedPair(NamedTuple):
    """A pair, its connector and its tensor parallelism."""

    prefill: Server
    decode: Server
    name: str
    tp: str


@dataclass
class LoadedAnswer:
    """One answer; its times begin with the request to prefill."""

    tokens: list[int]
    first_s: float = 0.0
    whole_s: float = 0.0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it has all tokens."""
        return not self.error and len(self.tokens) == TOKENS


class LoadedLevel(NamedTuple):
    """The answers at one level, in the order of the prompts, and the time for all."""

    seconds: float
    answers: list[LoadedAnswer]


def load_beside_nixl(run: VllmRun) -> str:
    """kvferry and NixlConnector under load, with equal and with different tensor parallelism."""
    pairs = [
        LoadedPair(*run.pair(f"{kind}wide-p{ranks}", f"{kind}wide-d"), name, tp)
        for tp, ranks in ((TP1, ""), (TP2, "x2"))
        for name, kind in (("kvferry", ""), ("NixlConnector", "nixl-"))
    ]
    for pair in pairs:
        asyncio.run(
            _measure(pair, 1, [prompt(n, f"connect {pair}") for n in run.scale.loaded_lengths])
        )
    decode = run.servers["wide-d"]
    num_asked, done = 0, metric(decode, ROOMS_DONE)
    # Problems fail the case when everything has been measured.
    problems: list[str] = []
    for length in run.scale.loaded_lengths:
        for number, level in enumerate(run.scale.levels):
            num_requests = max(level, min(MOST, max(LEAST, ROUNDS * level)))
            answers = {}
            by = number % len(pairs)
            for pair in pairs[by:] + pairs[:by]:
                if pair.tp == TP2 and (length > SHARED_LENGTH or level > SHARED_LEVEL):
                    continue
                # Pairs that share a decode must not find each other's prompts there.
                seeds = [f"{length} {level} {pair.tp} {one}" for one in range(num_requests)]
                prompts = [prompt(length, seed) for seed in seeds]
                found = asyncio.run(_measure(pair, level, prompts))
                answers[pair.name, pair.tp] = [answer.tokens for answer in found.answers]
                num_asked += num_requests if pair.decode is decode else 0
                run.figures.append(_figure(length, level, pair, found))
                say(f"{run.figures[-1]}")
                problems += _problems(f"{pair.name} {pair.tp}, {length} x {level}", found.answers)
            if level == 1:
                problems += [
                    f"{length} tokens, {tp}: the two connectors' answers differ"
                    for tp in {tp for _, tp in answers}
                    if answers["kvferry", tp] != answers["NixlConnector", tp]
                ]
    expect(not problems, "; ".join(problems))
    eventually(
        lambda: metric(decode, ROOMS_DONE) - done == num_asked,
        f"{decode.name} counts {num_asked} more rooms than {done:.0f}",
    )
    return f"{num_asked} requests through kvferry, all answers whole"


def _problems(what: str, answers: Sequence[LoadedAnswer]) -> list[str]:
    """Return a sentence if requests failed or answers are not whole."""
    failed = [answer for answer in answers if not answer.is_whole]
    if not failed:
        return []
    first = failed[0].error or f"an answer of {len(failed[0].tokens)} tokens"
    return [f"{what}: {len(failed)} of {len(answers)} failed: {first}"]


async def _measure(pair: LoadedPair, level: int, prompts: Sequence[Sequence[int]]) -> LoadedLevel:
    """Send this many prompts at once, until all are answered."""
    answers: list[LoadedAnswer | None] = [None] * len(prompts)
    numbers = iter(range(len(prompts)))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def worker() -> None:
            # The workers share one iterator.
            for number in numbers:
                answers[number] = await _in_turn(session, pair, prompts[number])

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(level):
                group.create_task(worker())
    return LoadedLevel(time.monotonic() - began, [answer for answer in answers if answer])


async def _in_turn(
    session: aiohttp.ClientSession, pair: LoadedPair, ids: Sequence[int]
) -> LoadedAnswer:
    """Ask prefill, and then decode."""
    answer, began = LoadedAnswer([]), time.monotonic()
    try:
        first = body(ids, 1, kv_transfer_params=PROXY)
        async with session.post(f"{pair.prefill.url}{COMPLETIONS}", json=first) as response:
            params = (await response.json())["kv_transfer_params"]
        second = body(ids, TOKENS, kv_transfer_params=params, stream=True)
        async with session.post(f"{pair.decode.url}{COMPLETIONS}", json=second) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                answer.tokens.extend(choices[0].get("token_ids") or [] if choices else [])
                if answer.tokens and not answer.first_s:
                    answer.first_s = time.monotonic() - began
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
        answer.error = repr(error)
    answer.whole_s = time.monotonic() - began
    return answer


def _figure(length: int, level: int, pair: LoadedPair, found: LoadedLevel) -> Json:
    """Return a row of the table."""
    whole = [answer for answer in found.answers if answer.is_whole]

    def shown_ms(seconds: list[float]) -> str:
        if len(seconds) < 2:
            return "-"
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        return f"{1e3 * cuts[49]:.1f} / {1e3 * cuts[98]:.1f}"

    return {
        "tokens": length,
        "at once": level,
        "connector": pair.name,
        "ranks": pair.tp,
        "first p50 / p99 ms": shown_ms([answer.first_s for answer in whole]),
        "whole p50 / p99 ms": shown_ms([answer.whole_s for answer in whole]),
        "requests/s": round(len(whole) / found.seconds, 2),
        "tokens/s": round(TOKENS * len(whole) / found.seconds, 1),
        "failed": len(found.answers) - len(whole),
    }
