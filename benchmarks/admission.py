"""Does a cluster under four times its load keep its throughput, and answer everybody in time?

    .venv/bin/python benchmarks/admission.py

Starts the reference cluster with a small random model, one prefill and two decode workers. A closed
loop finds the peak; then requests arrive at random (Poisson) times at four times that rate, whether
or not earlier ones were answered. The two take turns, because other programs change what the
machine can do, and the means are compared. A request is late without an answer at the router's
deadline. Every
answer's length is checked, and that prefill has sent nothing for refused requests: the bytes that
all workers have carried are those of the answers. The last line is JSON; the exit status is 1 if
the overloaded cluster keeps less than 90 % of the peak, or a request is late or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
from msgspec.structs import replace

from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    WorkerSection,
)
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.models.find import find_model
from kvferry.router.options import RouterOptions
from kvferry.router.worker_pool import WorkerRole

MODEL = "tiny"
OVERLOAD, KEPT = 4.0, 0.9
# Of the router. Clients wait a little longer, so that its answer at the deadline still counts.
DEADLINE_S, QUEUE_S, MAX_QUEUED, SLACK_S = 60.0, 8.0, 32, 2.0
NUM_INPUT, NUM_OUTPUT = 384, 64
VOCABULARY = 256
WARM_S = 5.0
MAX_REQUESTS = 8


class Outcome(NamedTuple):
    """Outcome of one request. ``status`` is None if no answer came in time."""

    status: int | None
    seconds: float
    ended_at: float
    num_bytes: int


def main() -> int:
    args = arguments()
    tokens = 2 * MAX_REQUESTS * (NUM_INPUT + NUM_OUTPUT)
    side = WorkerSection(cache_tokens=tokens, max_requests=MAX_REQUESTS)
    cluster = ClusterDescription(
        model=MODEL,
        transport=args.transport,
        discovery=DiscoverySection(port=0),
        router=RouterOptions(port=0, deadline_s=DEADLINE_S, queue_s=QUEUE_S, max_queued=MAX_QUEUED),
        prefill=(side,),
        decode=(replace(side, instances=2),),
    )
    with tempfile.TemporaryFile() as log, ClusterLaunch(output=log) as launch:
        url = launch.start_all(cluster, find_model(MODEL), lambda *_: None)
        roles = tuple(WorkerRole)
        workers = [child.url for child in launch.children if child.name.startswith(roles)]
        document = asyncio.run(measure(url, workers, args.seconds, args.rounds))
    for bar, holds in document["bars"].items():
        say(f"{'holds' if holds else 'FAILS'}: {bar}")
    print(json.dumps(document))
    return 0 if all(document["bars"].values()) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="of overload between two peaks")
    parser.add_argument("--transport", default="shm")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- requests


async def request(http: aiohttp.ClientSession, url: str, numbers: random.Random) -> Outcome:
    prompt = [numbers.randrange(VOCABULARY - 6) for _ in range(NUM_INPUT)]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT,
        "ignore_eos": True,
        "kvferry": {"on_failure": "fail"},
    }
    begin = time.monotonic()
    try:
        async with asyncio.timeout(DEADLINE_S + SLACK_S):
            async with http.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
    except TimeoutError:
        return Outcome(None, time.monotonic() - begin, time.monotonic(), 0)
    end = time.monotonic()
    num_bytes = 0
    if response.status == 200:
        if answer["usage"]["completion_tokens"] != NUM_OUTPUT:
            raise SystemExit(f"an answer has another length: {answer['usage']}")
        num_bytes = answer["kvferry"]["bytes"]
    elif response.status == 429 and int(response.headers["Retry-After"]) < 1:
        raise SystemExit("a refusal does not say when to retry")
    return Outcome(response.status, end - begin, end, num_bytes)


Ask = Callable[[], Awaitable[Outcome]]


async def closed_loop(ask: Ask, num_clients: int, seconds: float) -> list[Outcome]:
    """Keep ``num_clients`` requests in flight."""
    until = time.monotonic() + seconds
    outcomes: list[Outcome] = []

    async def client() -> None:
        while time.monotonic() < until:
            outcomes.append(await ask())

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return outcomes


async def open_loop(ask: Ask, rate: float, seconds: float, numbers: random.Random) -> list[Outcome]:
    """Begin requests at random times, whatever became of the earlier ones."""
    at, until = time.monotonic(), time.monotonic() + seconds
    tasks: list[asyncio.Task[Outcome]] = []
    while at < until:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.ensure_future(ask()))
        at += numbers.expovariate(rate)
    return list(await asyncio.gather(*tasks))


# ---------------------------------------------------------------- phases


async def measure(url: str, workers: list[str], seconds: float, rounds: int) -> dict[str, Any]:
    numbers = random.Random(1)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        def ask() -> Awaitable[Outcome]:
            return request(http, url, numbers)

        # Requests that two decode workers compute at a time, and half as many that wait for pages.
        num_clients = 3 * MAX_REQUESTS
        all_outcomes = list(await closed_loop(ask, num_clients, WARM_S))
        phases: dict[str, list[dict[str, Any]]] = {"peak": [], "overload": []}

        async def phase(name: str, run: Awaitable[list[Outcome]]) -> None:
            begin = time.monotonic()
            outcomes = await run
            all_outcomes.extend(outcomes)
            phases[name].append(summary(outcomes, begin, seconds))
            say(f"{name}: {phases[name][-1]}")

        offered = []
        for _ in range(rounds):
            await phase("peak", closed_loop(ask, num_clients, seconds))
            offered.append(OVERLOAD * mean_rate(phases["peak"][-1:]))
            await phase("overload", open_loop(ask, offered[-1], seconds, numbers))
        await phase("peak", closed_loop(ask, num_clients, seconds))
        carried = await carried_bytes(http, workers)
    answered_bytes = sum(one.num_bytes for one in all_outcomes)
    peak, over = mean_rate(phases["peak"]), mean_rate(phases["overload"])
    all_phases = phases["peak"] + phases["overload"]
    names = ("requests", "200", "429", "late", "other")
    return {
        "seconds": seconds,
        "rounds": rounds,
        "input_tokens": NUM_INPUT,
        "output_tokens": NUM_OUTPUT,
        "offered_per_s": round(statistics.mean(offered), 1),
        "peak_per_s": round(peak, 2),
        "overload_per_s": round(over, 2),
        "kept": round(over / peak, 3),
        "totals": {
            kind: {name: sum(one[name] for one in each) for name in names}
            for kind, each in phases.items()
        },
        "carried_bytes": carried,
        "answered_bytes": answered_bytes,
        "phases": phases,
        "bars": {
            f"keeps {KEPT:.0%} of the peak": over >= KEPT * peak,
            "no request is late": not any(one["late"] for one in all_phases),
            "answers are 200 or 429": not any(one["other"] for one in all_phases),
            "some are refused": all(one["429"] for one in phases["overload"]),
            "prefill computed for no refused request": carried == answered_bytes,
        },
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def mean_rate(phases: list[dict[str, Any]]) -> float:
    return float(statistics.mean(one["answered_per_s"] for one in phases))


def summary(outcomes: list[Outcome], begin: float, seconds: float) -> dict[str, Any]:
    """Return counts by status, and the rate of answers in the phase after its first quarter."""
    counts = Counter(one.status for one in outcomes)
    first, last = begin + seconds / 4, begin + seconds
    answered = [one for one in outcomes if one.status == 200]
    counted = sum(first <= one.ended_at < last for one in answered)
    waits = sorted(one.seconds for one in answered)
    refused = sorted(one.seconds for one in outcomes if one.status == 429)
    return {
        "requests": len(outcomes),
        "200": counts[200],
        "429": counts[429],
        "late": counts[None],
        "other": sum(n for status, n in counts.items() if status not in (200, 429, None)),
        "answered_per_s": round(counted / (last - first), 2),
        "answered_s": percentiles(waits),
        "refused_s": percentiles(refused),
    }


def percentiles(seconds: list[float]) -> list[float]:
    """Return the median, the 99th percentile and the largest of sorted times."""
    if not seconds:
        return []
    places = (len(seconds) // 2, 99 * len(seconds) // 100, -1)
    return [round(seconds[place], 3) for place in places]


async def carried_bytes(http: aiohttp.ClientSession, workers: list[str]) -> int:
    """Return the bytes that all workers have sent in rooms that ended."""
    total = 0
    for worker in workers:
        async with http.get(f"{worker}/healthz") as response:
            total += sum((await response.json())["carried_bytes"].values())
    return total


if __name__ == "__main__":
    sys.exit(main())
