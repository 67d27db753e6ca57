"""The case of vLLM pairs under load: first tokens and throughput against concurrency.

Every pair is asked in turn, as vLLM's own proxies do: prefill, and then decode with its answer. The
ways take turns at every level. Under load the tokens of a bfloat16 model depend on its batches, so
an answer counts if it is whole; the tokens are compared where requests come one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from gpu_engines.checklist import eventually, expect
from gpu_engines.client import Json, metric
from gpu_engines.servers import Server, say
from gpu_engines.vllm_servers import COMPLETIONS, PROXY, ROOMS_DONE, body, prompt
from kvferry.cli.load.client import LoadReply, ask, session_for
from kvferry.cli.load.stats import Level, summarise
from kvferry.cli.load.sweep import for_each

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


def load_beside_nixl(run: VllmRun) -> str:
    """kvferry and NixlConnector under load, with equal and with different tensor parallelism."""
    pairs = [
        LoadedPair(*run.pair(f"{kind}wide-p{ranks}", f"{kind}wide-d"), name, tp)
        for tp, ranks in ((TP1, ""), (TP2, "x2"))
        for name, kind in (("kvferry", ""), ("NixlConnector", "nixl-"))
    ]
    for pair in pairs:
        _checked(
            pair, 1, [prompt(length, f"connect {pair}") for length in run.scale.loaded_lengths]
        )
    decode = run.servers["wide-d"]
    num_asked, done = 0, metric(decode, ROOMS_DONE)
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
                replies = _checked(pair, level, [prompt(length, seed) for seed in seeds])
                answers[pair.name, pair.tp] = [reply.tokens for reply in replies]
                num_asked += num_requests if pair.decode is decode else 0
                run.figures.append(_figure(length, pair, summarise(level, replies)))
                say(f"{run.figures[-1]}")
            if level == 1:
                for tp in {tp for _, tp in answers}:
                    equal = answers["kvferry", tp] == answers["NixlConnector", tp]
                    expect(equal, f"{length} tokens, {tp}: the two connectors' answers differ")
    eventually(
        lambda: metric(decode, ROOMS_DONE) - done == num_asked,
        f"{decode.name} counts {num_asked} more rooms than {done:.0f}",
    )
    return f"{num_asked} requests through kvferry, all answers whole"


def _checked(pair: LoadedPair, level: int, prompts: Sequence[Sequence[int]]) -> list[LoadReply]:
    """Return the replies to prompts, all of them whole."""
    replies = asyncio.run(_measure(pair, level, prompts))
    failed = [reply.error for reply in replies if reply.error]
    expect(
        not failed, f"{pair.name} {pair.tp}, {level} at once: {len(failed)} failed: {failed[:1]}"
    )
    lengths = {len(reply.tokens) for reply in replies}
    expect(lengths == {TOKENS}, f"{pair.name} {pair.tp}: answers of {lengths} tokens")
    return replies


async def _measure(
    pair: LoadedPair, level: int, prompts: Sequence[Sequence[int]]
) -> list[LoadReply]:
    """Return the replies to prompts of which this many are sent at once."""
    replies: dict[int, LoadReply] = {}
    async with session_for(pair.prefill.url) as prefill, session_for(pair.decode.url) as decode:

        async def ask_one(number: int) -> None:
            replies[number] = await _in_turn(prefill, decode, prompts[number])

        await for_each(range(len(prompts)), level, ask_one)
    return [replies[number] for number in range(len(prompts))]


async def _in_turn(
    prefill: aiohttp.ClientSession, decode: aiohttp.ClientSession, ids: Sequence[int]
) -> LoadReply:
    """Ask prefill, and then decode; the reply's times begin with the first request."""
    began = time.monotonic()
    path, timeout = COMPLETIONS.lstrip("/"), aiohttp.ClientTimeout(total=DEADLINE_S)
    first = body(ids, 1, kv_transfer_params=PROXY)
    async with prefill.post(path, json=first, timeout=timeout) as response:
        answer: Json = await response.json()
        if response.status != 200:
            return LoadReply(error=f"prefill answered {response.status}: {answer}"[:300])
    waited_s = time.monotonic() - began
    second = body(ids, TOKENS, kv_transfer_params=answer["kv_transfer_params"], stream=True)
    reply = await ask(decode, second, path=COMPLETIONS, deadline_s=DEADLINE_S)
    reply.began -= waited_s
    reply.total_s += waited_s
    reply.stamps = [stamp + waited_s for stamp in reply.stamps]
    return reply


def _figure(length: int, pair: LoadedPair, level: Level) -> Json:
    """Return a row of the table."""
    first, whole = level.ttft_s, level.total_s
    assert first is not None
    assert whole is not None
    return {
        "tokens": length,
        "at once": level.concurrency,
        "connector": pair.name,
        "ranks": pair.tp,
        "first_p50_ms": round(1e3 * first.p50, 1),
        "first_p99_ms": round(1e3 * first.p99, 1),
        "whole_p50_ms": round(1e3 * whole.p50, 1),
        "requests_per_s": round(level.requests_per_s, 2),
        "output_tokens_per_s": round(level.output_tokens_per_s, 1),
    }
