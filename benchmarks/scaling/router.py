"""A router before many fake workers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import ExitStack

import aiohttp
from router.fakes import FakeWorker, Wire

from benchmarks.scaling.measuring import (
    MIN_CORES,
    SCRIPT,
    Result,
    Watched,
    bars_of,
    growth,
    line_of,
    quantile_ms,
    say,
    started,
)
from kvferry.http.limits import raise_open_files


async def serve_workers(number: int) -> None:
    """Be fake workers, half prefill and half decode, until stdin ends."""
    raise_open_files()
    wire = Wire()
    workers = [FakeWorker(("prefill", "decode")[i % 2], f"w{i}", wire) for i in range(number)]
    for worker in workers:
        await worker.start()
    print(json.dumps([(worker.role, worker.url) for worker in workers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def post_for(url: str, seconds: float, at_once: int) -> list[float]:
    """Post completions, several at once; return the seconds that each took."""
    took: list[float] = []
    end = time.monotonic() + seconds
    body = {"model": "m", "prompt": "p", "max_tokens": 3}

    async def client(http: aiohttp.ClientSession) -> None:
        while (begin := time.monotonic()) < end:
            async with http.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            took.append(time.monotonic() - begin)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.gather(*(client(http) for _ in range(at_once)))
    return took


async def until_all_up(url: str, number: int) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/healthz") as response:
                workers = (await response.json())["workers"]
            if sum(worker["up"] for worker in workers) == number:
                return
            await asyncio.sleep(0.2)


def measure_router(number: int, window_s: float) -> Result:
    with ExitStack() as stack:
        child = stack.enter_context(
            started(sys.executable, str(SCRIPT), "--serve-workers", str(number))
        )
        workers = json.loads(line_of(child))
        flags = [word for role, url in workers for word in (f"--{role}-url", url)]
        words = [sys.executable, "-m", "kvferry", "serve", "router", "--port", "0", *flags]
        process = stack.enter_context(started(*words))
        url, router = line_of(process).split()[-1], Watched(process.pid)
        asyncio.run(until_all_up(url, number))
        router.cores()
        time.sleep(window_s)
        idle_cores = router.cores()
        # Directly from a decode worker: what a request costs without the router.
        decode = next(one for role, one in workers if role == "decode")
        direct = asyncio.run(post_for(decode, 1.0, 1))
        alone = asyncio.run(post_for(url, 1.5, 1))
        before = router.cpu_s()
        took = asyncio.run(post_for(url, window_s, 16))
        cpu_s = router.cpu_s() - before
    row = {
        "workers": number,
        "idle_cores": round(idle_cores, 4),
        "requests_per_s": round(len(took) / window_s),
        "cpu_ms_per_request": round(1e3 * cpu_s / max(1, len(took)), 3),
        "p50_ms": quantile_ms(took, 0.5),
        "p99_ms": quantile_ms(took, 0.99),
        "direct_p50_ms": quantile_ms(direct, 0.5),
        "alone_p50_ms": quantile_ms(alone, 0.5),
        "rss_bytes": router.rss_bytes() if process.poll() is None else 0,
    }
    say(f"router: {row}")
    return row


def run_router(sizes: list[int], window_s: float) -> Result:
    rows = [measure_router(size, window_s) for size in sizes]
    exponents = growth(rows, "workers", {"idle_cores": MIN_CORES, "cpu_ms_per_request": 0.1})
    return {"rows": rows, "exponents": exponents, "bars": bars_of("router", exponents)}
