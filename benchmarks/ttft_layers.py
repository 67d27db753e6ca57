"""Time to the first token of the reference server, with pushes of whole chunks and by layers.

    .venv/bin/python benchmarks/ttft_layers.py [--prefill 1 --decode 3] [--transport nixl]

Clusters of real processes that differ only in ``[transfer] layers`` run at the same time and get
the same prompts in turn, so that other load affects all of them alike. Each prompt is one chunk and
is used once, and its answers must have the same tokens. The last line is JSON; the exit status is 1
if an answer failed or differed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import aiohttp

from kvferry.cli.load.client import LoadReply, ask, session_for
from kvferry.cli.load.prompts import PromptForm, PromptGenerator, PromptKind
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    WorkerSection,
    check,
)
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.models.find import find_model
from kvferry.router.options import RouterOptions

FORM = PromptForm(PromptKind.SMALL_IDS, exact=True)
DEADLINE_S = 120.0
SEED = 7
# The first prompts are not timed.
WARM_UP = 1


def main() -> int:
    args = arguments()
    settings = [
        setting if setting in ("auto", "all") else int(setting)
        for setting in args.layers.split(",")
    ]
    sizes = [int(text) for text in args.tokens.split(",")]
    model = find_model(args.model)
    urls = []
    with ExitStack() as stack:
        for setting in settings:
            cluster = describe(args, setting, max(sizes))
            check(cluster, model)
            urls.append(
                stack.enter_context(ClusterLaunch()).start_all(cluster, model, lambda *_: None)
            )
        rows = asyncio.run(compare(args, model.name, settings, urls, sizes))
    good = all(row["verified"] for row in rows)
    print(json.dumps({"model": model.name, "transport": args.transport, "rows": rows}))
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="a folder, or tiny (default: the default model)"
    )
    parser.add_argument("--prefill", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--decode", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--layers", default="all,auto", help="settings to compare; ratios refer to the first"
    )
    parser.add_argument("--tokens", default="64,256")
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def describe(args: argparse.Namespace, layers: Any, most_tokens: int) -> ClusterDescription:
    """Return the description of one cluster. The largest prompt is one chunk."""
    same: dict[str, Any] = {
        "device": args.device,
        "step_tokens": most_tokens,
        "cache_tokens": 4 * most_tokens,
        "prefix_cache": False,
    }
    return ClusterDescription(
        model=args.model,
        transport=args.transport,
        layers=layers,
        discovery=DiscoverySection(port=0),
        router=RouterOptions(port=0),
        prefill=(WorkerSection(tp=args.prefill, **same),),
        decode=(WorkerSection(tp=args.decode, **same),),
    )


async def compare(
    args: argparse.Namespace, model: str, settings: list[Any], urls: list[str], sizes: list[int]
) -> list[dict[str, Any]]:
    """Return a row for each size."""
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(session_for(url)) for url in urls]
        rows = []
        for tokens in sizes:
            rounds = await ask_all(sessions, PromptGenerator(model, tokens, 4, SEED), args.repeat)
            rows.append(row(tokens, settings, rounds))
            print(rows[-1], file=sys.stderr, flush=True)
        return rows


async def ask_all(
    sessions: list[aiohttp.ClientSession], asker: PromptGenerator, repeat: int
) -> list[list[LoadReply]]:
    """Return the replies of all clusters to each prompt, asked in alternating order."""
    rounds = []
    for number in range(WARM_UP + repeat):
        body = asker.body(FORM)
        turn = range(len(sessions)) if number % 2 else reversed(range(len(sessions)))
        replies = {
            at: await ask(sessions[at], body, path=FORM.path, deadline_s=DEADLINE_S) for at in turn
        }
        rounds.append([replies[at] for at in range(len(sessions))])
    return rounds[WARM_UP:]


def row(tokens: int, settings: list[Any], rounds: list[list[LoadReply]]) -> dict[str, Any]:
    """Return the median times, and the median ratios to the first setting, prompt by prompt."""
    problems = [reply.error for replies in rounds for reply in replies if reply.error]
    same = all(reply.tokens == replies[0].tokens for replies in rounds for reply in replies)
    times = [[reply.ttft_s or DEADLINE_S for reply in replies] for replies in rounds]
    return {
        "tokens": tokens,
        "ttft_s": {
            str(setting): statistics.median(each[at] for each in times)
            for at, setting in enumerate(settings)
        },
        "ratio": {
            str(setting): statistics.median(each[at] / each[0] for each in times)
            for at, setting in enumerate(settings)
        },
        "verified": same and not problems,
        "problems": problems[:3],
    }


if __name__ == "__main__":
    sys.exit(main())
