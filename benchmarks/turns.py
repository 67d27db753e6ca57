"""Time to the first token of a conversation's second turn: its cache pulled, or recomputed.

    .venv/bin/python benchmarks/turns.py [--device cuda] [--tokens 1024,4096] [--json]

Three workers of the reference server on a random model, which needs no network. For each prompt a
decode worker answers the first turn. The second turn goes to both prefill workers, one after the
other: one is told the holder and pulls, the other computes. They change places from prompt to
prompt, and so does the order. The answers must have the same tokens, the pull must have brought
the history, and the recomputation nothing.

``crossover`` is the shortest history from which on pulling is faster. ``router`` says for each size
whether the router's cost model pulls: with the constants that it begins with, and fitted to the
reports of all replies; ``right`` compares the latter with the measurement. The exit status is 1
if an answer failed or differed. The last line is JSON; with ``--json`` there is no other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kvferry.cli.load.client import COMPLETIONS, LoadReply, ask, session_for
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    WorkerSection,
    check,
)
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.models.tiny import make_tiny
from kvferry.router.conversations import PrefillReport, PullCosts
from kvferry.router.options import PullOptions, RouterOptions

HOLDER, ASKERS = "decode-0", ("prefill-0", "prefill-1")
NEW_TOKENS, ANSWER_TOKENS = 32, 8
DEADLINE_S = 300.0
# Prompts of each size that are not timed.
WARM_UP = 1
TOKENS = {"cpu": "256,512,1024", "cuda": "1024,2048,4096,8192,16384,32768"}
# About 0.8 billion parameters on a GPU, with a cache of 128 KiB for a token in bfloat16.
MODELS: dict[str, dict[str, object]] = {
    "cpu": {},
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


class SecondTurn(NamedTuple):
    """Both replies to one prompt."""

    pulled: LoadReply
    computed: LoadReply
    history: int

    def problem(self, page: int) -> str:
        """Return why the replies are no measurement; empty if they are one."""
        if error := self.pulled.error or self.computed.error:
            return error
        if self.pulled.tokens != self.computed.tokens:
            return f"the tokens differ: {self.pulled.tokens} and {self.computed.tokens}"
        brought = self.pulled.report["pulled"], _cached(self.computed)
        least = self.history // page * page
        return "" if brought[0] >= least and brought[1] == 0 else f"pulled and cached: {brought}"


def main() -> int:
    args = arguments()
    sizes = [int(text) for text in (args.tokens or TOKENS[args.device]).split(",")]
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = {"max_position_embeddings": max(sizes) + 1024}
        changes |= MODELS[args.device]
        model = ModelFolder(make_tiny(Path(folder), **changes), "random")
        cluster = describe(args, max(sizes))
        check(cluster, model)
        with ClusterLaunch() as launch:
            launch.start_all(cluster, model, lambda *_: None)
            urls = {name: launch[name].url for name in (HOLDER, *ASKERS)}
            document = asyncio.run(measure(args, urls, sizes))
    print(json.dumps(document))
    return 0 if all(row["verified"] for row in document["rows"]) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(TOKENS), default="cpu")
    parser.add_argument("--tokens", help="lengths of the first turn (by device)")
    parser.add_argument("--prefill", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--dtype", default="float32", help="float32 compares exactly")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def describe(args: argparse.Namespace, most_tokens: int) -> ClusterDescription:
    """Return the description of the cluster. A worker's cache holds three of the longest turns."""
    section: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "page": args.page,
        "step_tokens": 1024,
        "cache_tokens": 3 * (most_tokens + 1024),
    }
    return msgspec.convert(
        {
            "transport": args.transport,
            "discovery": DiscoverySection(port=0),
            "router": RouterOptions(port=0),
            "prefill": [WorkerSection(tp=args.prefill, instances=len(ASKERS), **_typed(section))],
            "decode": [WorkerSection(**_typed(section))],
        },
        ClusterDescription,
    )


def _typed(section: dict[str, Any]) -> dict[str, Any]:
    made = msgspec.convert(section, WorkerSection)
    return {name: getattr(made, name) for name in section}


async def measure(args: argparse.Namespace, urls: dict[str, str], sizes: list[int]) -> Any:
    """Return the document."""
    costs, rows = PullCosts(PullOptions()), []
    async with AsyncExitStack() as stack:
        sessions = {
            name: await stack.enter_async_context(session_for(url)) for name, url in urls.items()
        }
        for size in sizes:
            turns = [
                await second_turn(sessions, size, number) for number in range(WARM_UP + args.repeat)
            ]
            for turn in turns:
                for reply in (turn.computed, turn.pulled):
                    learn(costs, reply)
            rows.append(row(size, turns[WARM_UP:], args.page))
            if not args.json:
                print(rows[-1], file=sys.stderr, flush=True)
    for each in rows:
        each["router"] = choice(costs, each)
    faster = [each["tokens"] for each in rows if not each["pull_is_faster"]]
    later = [each["tokens"] for each in rows if each["tokens"] > max(faster, default=0)]
    return {
        "device": args.device,
        "dtype": args.dtype,
        "prefill_tp": args.prefill,
        "transport": args.transport,
        "crossover": min(later, default=None),
        "rows": rows,
    }


async def second_turn(
    sessions: dict[str, aiohttp.ClientSession], size: int, number: int
) -> SecondTurn:
    """Answer the first turn at the holder, then the second at both askers, one at a time."""
    drawn = random.Random(1000 * size + number)
    first = [drawn.randrange(256) for _ in range(size)]
    before = await asked(sessions[HOLDER], first)
    prompt = [*first, *before.tokens, *(drawn.randrange(256) for _ in range(NEW_TOKENS))]
    puller, computer = ASKERS if number % 2 else ASKERS[::-1]
    replies = {}
    for name in (puller, computer) if number // 2 % 2 else (computer, puller):
        own = {"holder": HOLDER} if name == puller else None
        replies[name] = await asked(sessions[name], prompt, own)
    # The last token of an answer is not computed.
    history = size + len(before.tokens) - 1
    return SecondTurn(replies[puller], replies[computer], history)


async def asked(
    session: aiohttp.ClientSession, prompt: list[int], own: dict[str, Any] | None = None
) -> LoadReply:
    body = {
        "model": "random",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kvferry": own,
    }
    return await ask(session, body, path=COMPLETIONS, deadline_s=DEADLINE_S)


def learn(costs: PullCosts, reply: LoadReply) -> None:
    """Fit the router's cost model to a reply, as the router does."""
    if not reply.error:
        usage = msgspec.convert(reply.usage, PrefillReport.Usage)
        costs.learn("any", usage, msgspec.convert(reply.report, PrefillReport.Own))


def choice(costs: PullCosts, each: dict[str, Any]) -> dict[str, bool]:
    """Return whether the router pulls a history of this length."""
    num_tokens, assumed = each["tokens"] + ANSWER_TOKENS, PullCosts(PullOptions())
    fitted = costs.pays("any", num_tokens)
    return {
        "pulls_at_first": assumed.pays("any", num_tokens),
        "pulls": fitted,
        "right": fitted == each["pull_is_faster"],
    }


def row(size: int, turns: list[SecondTurn], page: int) -> dict[str, Any]:
    """Return the medians and the ranges of one size."""
    problems = [problem for turn in turns if (problem := turn.problem(page))]
    times = {
        "pull": [turn.pulled.ttft_s or DEADLINE_S for turn in turns],
        "compute": [turn.computed.ttft_s or DEADLINE_S for turn in turns],
    }
    ratios = [pull / compute for pull, compute in zip(*times.values(), strict=True)]
    return {
        "tokens": size,
        "ttft_s": {
            name: {"p50": statistics.median(each), "min": min(each), "max": max(each)}
            for name, each in times.items()
        },
        "pull_s": statistics.median(turn.pulled.report.get("pull_s", 0.0) for turn in turns),
        "ratio": statistics.median(ratios),
        "pull_is_faster": statistics.median(ratios) < 1,
        "verified": not problems,
        "problems": problems[:3],
    }


def _cached(reply: LoadReply) -> int:
    return int(reply.usage["prompt_tokens_details"]["cached_tokens"])


if __name__ == "__main__":
    sys.exit(main())
