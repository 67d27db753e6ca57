"""How long does a stream pause when its decode worker drains?

    .venv/bin/python benchmarks/migration.py --json

Starts two reference clusters with a small random model, each with one prefill and two decode
workers. In one of them decode workers keep a prefix cache and pull what the drained worker has
computed; in the other they do not, and compute it again. In each round 16 streams begin at one
decode worker of a cluster, which then gets SIGTERM. The clusters take turns, because other programs
change what the machine can do. The pause of a stream is the longest time between two of its events
after the signal; ``undisturbed`` is the same for streams of which no worker drains. Every answer's
tokens are compared with those of a whole answer from the cluster without a prefix cache. A stream
that ended before it could move has no pause. The last line is JSON; the exit status is 1 if an
answer differs or no stream has moved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from typing import Any, NamedTuple

import aiohttp
from msgspec.structs import replace

from kvferry import DType
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    WorkerSection,
)
from kvferry.reference.cluster.launch import ChildProcess, ClusterLaunch, health
from kvferry.reference.models.find import find_model
from kvferry.router.options import RouterOptions

MODEL = "tiny"
VOCABULARY = 256
NUM_STREAMS = 16
DECODE = ("decode-0", "decode-1")
PATIENCE_S = 300.0


class Stream(NamedTuple):
    """The tokens of an answer, the times at which its events came, and whether it has moved."""

    tokens: list[int]
    times: list[float]
    moved: bool

    def pause_s(self, since: float) -> float:
        """Return the longest time between two events, of which the second came after ``since``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def main() -> int:
    args = arguments()
    # In double precision no token depends on where it is computed.
    side = WorkerSection(
        dtype=DType.FLOAT64, cache_tokens=2 * NUM_STREAMS * (args.input + args.output)
    )
    description = ClusterDescription(
        model=MODEL,
        transport=args.transport,
        discovery=DiscoverySection(port=0),
        router=RouterOptions(port=0, poll_s=0.2),
        prefill=(side,),
        decode=(replace(side, instances=len(DECODE)),),
    )
    model, bare = find_model(MODEL), replace(side, prefix_cache=False)
    without = replace(description, prefill=(bare,), decode=(replace(bare, instances=len(DECODE)),))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        clusters: dict[str, tuple[ClusterLaunch, str]] = {}
        for name, one in (("pull", description), ("recompute", without)):
            launch = stack.enter_context(ClusterLaunch(output=log))
            clusters[name] = launch, launch.start_all(one, model, lambda *_: None)
        document = asyncio.run(measure(clusters, args))
    if not args.json:
        for name in ("undisturbed", *clusters):
            say(f"{name}: {document[name]}")
    print(json.dumps(document))
    moved = all(document[name]["count"] for name in clusters)
    return 0 if moved and document["differing"] == 0 else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", action="store_true", help="print nothing but the document")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(
    clusters: dict[str, tuple[ClusterLaunch, str]], args: argparse.Namespace
) -> dict[str, Any]:
    numbers, differing = random.Random(1), 0
    pauses: dict[str, list[float]] = {name: [] for name in ("undisturbed", *clusters)}
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        for number in range(args.rounds):
            leaving, staying = DECODE[:: 1 if number % 2 else -1]
            for name, (launch, url) in clusters.items():
                bodies = [body_of(numbers, args) for _ in range(NUM_STREAMS)]
                drained = await drain_round(http, (launch, url), bodies, leaving, staying)
                others = [body_of(numbers, args) for _ in range(NUM_STREAMS)]
                pauses["undisturbed"] += [
                    one.pause_s(one.times[0]) for one in await stream_all(http, url, others)
                ]
                pauses[name] += [pause_s for _, pause_s in drained if pause_s is not None]
                expected = await asyncio.gather(
                    *(whole(http, clusters["recompute"][1], body) for body in bodies)
                )
                differing += sum(
                    tokens != right for (tokens, _), right in zip(drained, expected, strict=True)
                )
    summaries = {name: summary(seconds) for name, seconds in pauses.items()}
    return {
        "streams": NUM_STREAMS,
        "rounds": args.rounds,
        "input_tokens": args.input,
        "output_tokens": args.output,
        **summaries,
        "differing": differing,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def body_of(numbers: random.Random, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": [numbers.randrange(VOCABULARY) for _ in range(args.input)],
        "max_tokens": args.output,
        "temperature": 1.0,
        "seed": numbers.randrange(1 << 32),
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def drain_round(
    http: aiohttp.ClientSession,
    cluster: tuple[ClusterLaunch, str],
    bodies: list[dict[str, Any]],
    leaving: str,
    staying: str,
) -> list[tuple[list[int], float | None]]:
    """Stream answers from ``leaving``, drain it, and start it again; return tokens and pauses."""
    launch, url = cluster
    # A stopped process gets no streams.
    launch[staying].process.send_signal(signal.SIGSTOP)
    await until_up(url, staying, up=False)
    begun: asyncio.Queue[None] = asyncio.Queue()
    asking = asyncio.ensure_future(stream_all(http, url, bodies, begun))
    for _ in bodies:
        await begun.get()
    launch[staying].process.send_signal(signal.SIGCONT)
    await until_up(url, staying, up=True)
    since = time.monotonic()
    launch[leaving].process.send_signal(signal.SIGTERM)
    streams = await asking
    await restart(launch, launch[leaving])
    await until_up(url, leaving, up=True)
    return [(one.tokens, one.pause_s(since) if one.moved else None) for one in streams]


async def restart(launch: ClusterLaunch, child: ChildProcess) -> None:
    if await asyncio.to_thread(child.process.wait, PATIENCE_S) != 0:
        raise SystemExit(f"{child.name} did not end well")
    child.start()
    await asyncio.to_thread(launch.wait_ready, [child])


async def until_up(url: str, name: str, *, up: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            workers = (await asyncio.to_thread(health, url)).get("workers", ())
            if [one["up"] for one in workers if one["name"] == name] == [up]:
                return
            await asyncio.sleep(0.02)


async def stream_all(
    http: aiohttp.ClientSession,
    url: str,
    bodies: list[dict[str, Any]],
    begun: asyncio.Queue[None] | None = None,
) -> list[Stream]:
    return await asyncio.gather(*(stream(http, url, body, begun) for body in bodies))


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    begun: asyncio.Queue[None] | None,
) -> Stream:
    tokens: list[int] = []
    times: list[float] = []
    last, source = b"", ""
    async with http.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                last = line.strip() or last
                continue
            times.append(time.monotonic())
            if len(times) == 1 and begun is not None:
                begun.put_nowait(None)
            chunk = json.loads(line[6:])
            if "choices" not in chunk:
                raise SystemExit(f"a stream failed: {line!r}")
            tokens += [token for choice in chunk["choices"] for token in choice["token_ids"]]
            source = chunk.get("kvferry", {}).get("source", source)
    if last != b"data: [DONE]":
        raise SystemExit("a stream ended early")
    # Its first worker would have reported a transfer from prefill.
    return Stream(tokens, times, moved=source == "recomputed")


async def whole(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        return list((await response.json())["choices"][0]["token_ids"])


def summary(seconds: list[float]) -> dict[str, float | int]:
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    places = {"p50_s": len(ordered) // 2, "p99_s": 99 * len(ordered) // 100, "max_s": -1}
    return {"count": len(ordered)} | {
        name: round(ordered[place], 4) for name, place in places.items()
    }


if __name__ == "__main__":
    sys.exit(main())
