"""Discovery with many ranks: what their registrations, renewals, restarts and lookups cost."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from discovery.etcd_cluster import EtcdCluster

from benchmarks.scaling.measuring import (
    MIN_BYTES,
    MIN_CORES,
    Result,
    Watched,
    bars_of,
    growth,
    line_of,
    quantile_ms,
    say,
    started,
)
from kvferry.discovery.base import Discovery
from kvferry.discovery.client import LEASE_S, discovery_at
from kvferry.discovery.records import DiscoveryError, RankRecord
from kvferry.layout import Layout, Parallel, attention

RANKS = 8
# Clients of this process, each with connections of its own.
NUM_CLIENTS = 64
AT_ONCE = 96
# Registrations of the benchmark outlive a run, so that only renewals that it makes count.
LONG_S = 300.0
# With etcd, ranks of a larger cluster ask for a longer lease (``EndpointConfig.lease_s``).
MANY_RANKS, LONG_LEASE_S = 5000, 60.0


@contextmanager
def service(kind: str) -> Iterator[tuple[str, Watched]]:
    """Run a discovery service; yield its URL and its process."""
    if kind == "etcd":
        with tempfile.TemporaryDirectory() as folder, EtcdCluster(Path(folder), 1) as cluster:
            member = cluster.members[0].process
            assert member is not None
            yield cluster.url("scale"), Watched(member.pid)
        return
    with started(sys.executable, "-m", "kvferry", "serve", "discovery", "--port", "0") as process:
        url = line_of(process).split()[-1]
        yield url, Watched(process.pid)


def new_record(name: str, rank: int, layout: Layout) -> RankRecord:
    return RankRecord(
        instance=name,
        rank=rank,
        incarnation=random.getrandbits(62) | 1,
        fingerprint="scale@1",
        layout=layout,
        transport="nixl,shm",
        control=f"tcp://10.0.{rank}.1:{20000 + rank}",
        metadata={"http": f"http://10.0.{rank}.1:8000", "role": "decode"},
    )


class Clients:
    """Simulated ranks over a limited number of real clients of one service."""

    def __init__(self, url: str) -> None:
        self.clients = [discovery_at(url) for _ in range(NUM_CLIENTS)]
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.calls = 0
        self.refused = 0

    def of(self, record: RankRecord) -> Discovery:
        return self.clients[hash(record.instance) % NUM_CLIENTS]

    async def all(self, calls: list[Callable[[], Awaitable[Any]]]) -> list[float]:
        """Make calls, a limited number at once; return the seconds that each took."""

        async def one(call: Callable[[], Awaitable[Any]]) -> float:
            async with self._gate:
                begin = time.monotonic()
                self.calls += 1
                try:
                    await call()
                except DiscoveryError as error:
                    self.refused += 1
                    if self.refused == 1:
                        say(f"  refused: {error}")
                return time.monotonic() - begin

        return list(await asyncio.gather(*map(one, calls)))

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


def asked_lease_s(kind: str, ranks: int) -> float:
    """Return the lease to ask for. The built-in service lengthens it; for etcd the user does."""
    return LONG_LEASE_S if kind == "etcd" and ranks > MANY_RANKS else LEASE_S


async def measure_discovery(
    kind: str, url: str, process: Watched, instances: int, window_s: float
) -> Result:
    """Measure one service with this many instances."""
    layout = Layout(attention(layers=61, kv_heads=8, head_dim=128), Parallel(tp=RANKS))
    names = [f"{'prefill' if i % 2 else 'decode'}-{i}" for i in range(instances)]
    records = {(n, r): new_record(n, r, layout) for n in names for r in range(RANKS)}
    clients, ranks, idle_bytes = Clients(url), len(records), process.rss_bytes()
    asked_s, period_s = asked_lease_s(kind, ranks), 0.0

    def register(record: RankRecord) -> Callable[[], Awaitable[None]]:
        return lambda: clients.of(record).register(record, LONG_S)

    async def renew(record: RankRecord) -> None:
        nonlocal period_s
        period_s = await clients.of(record).renew(record, asked_s)

    process.cores()
    begin = time.monotonic()
    await clients.all([register(one) for one in records.values()])
    register_s, register_cores = time.monotonic() - begin, process.cores()
    # A first renewal of a few tells the period that the service asks for.
    keys = list(records)
    await clients.all([lambda k=k: renew(records[k]) for k in keys[:16]])  # type: ignore[misc]
    lookups: list[float] = []
    renewals = await renew_for(clients, records, renew, lookups, period_s, window_s, process)
    restarted = names[::10]
    watched = restarted[:100]
    found = await restart_tenth(clients, records, restarted, watched, layout)
    begin = time.monotonic()
    listed = await clients.clients[0].list()
    first_list_s = time.monotonic() - begin
    begin, before = time.monotonic(), process.cpu_s()
    for _ in range(5):
        listed = await clients.clients[0].list()
    list_s, list_cpu_s = (time.monotonic() - begin) / 5, (process.cpu_s() - before) / 5
    num_complete = sum(one.complete for one in listed.instances)
    row = {
        "instances": instances,
        "ranks": ranks,
        "register_per_s": round(ranks / register_s),
        "register_cores": round(register_cores, 3),
        "renewal_period_s": round(period_s, 2),
        **renewals,
        "find_p50_ms": quantile_ms(lookups, 0.5),
        "find_p99_ms": quantile_ms(lookups, 0.99),
        **found,
        "first_list_ms": round(1e3 * first_list_s, 1),
        "list_ms": round(1e3 * list_s, 1),
        "list_cpu_ms": round(1e3 * list_cpu_s, 1),
        "rss_bytes": process.rss_bytes() - idle_bytes,
        "complete": num_complete,
        "refused": clients.refused,
    }
    await clients.close()
    return row


async def renew_for(
    clients: Clients,
    records: dict[tuple[str, int], RankRecord],
    renew: Callable[[RankRecord], Awaitable[None]],
    lookups: list[float],
    period_s: float,
    window_s: float,
    process: Watched,
) -> Result:
    """Renew all ranks at their rate for a while, and look instances up meanwhile."""
    order = list(records.values())
    rate = len(order) / period_s
    tick_s, due, index, took, sent = 0.05, 0.0, 0, [], 0
    tasks: list[asyncio.Task[list[float]]] = []
    process.cores()
    own = Watched(os.getpid())
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < window_s:
        due = rate * elapsed
        # A client that cannot keep up must not pile up calls without bound.
        number = min(int(due - sent), 4 * AT_ONCE)
        if sum(not task.done() for task in tasks) < 4:
            batch = [order[(index + i) % len(order)] for i in range(number)]
            index, sent = index + number, sent + number
            calls: list[Callable[[], Awaitable[Any]]] = [lambda r=r: renew(r) for r in batch]  # type: ignore[misc]
            tasks.append(asyncio.create_task(clients.all(calls)))
        name = random.choice(order).instance
        asked = time.monotonic()
        with suppress(DiscoveryError):
            await clients.clients[0].watch(name, "", 0.0)
            lookups.append(time.monotonic() - asked)
        await asyncio.sleep(tick_s)
    for task in tasks:
        took += await task
    elapsed = time.monotonic() - begin
    return {
        "renewals_per_s": round(sent / elapsed),
        "renewals_wanted_per_s": round(rate),
        "renew_p50_ms": quantile_ms(took, 0.5),
        "renew_p99_ms": quantile_ms(took, 0.99),
        "renew_cores": round(process.cores(), 3),
        "renew_client_cores": round(own.cores(), 3),
    }


async def restart_tenth(
    clients: Clients,
    records: dict[tuple[str, int], RankRecord],
    restarted: list[str],
    watched: list[str],
    layout: Layout,
) -> Result:
    """Register a tenth of the instances anew at once; time until watchers see them."""
    views = {}
    for name in watched:
        with suppress(DiscoveryError):
            views[name] = await clients.clients[1].watch(name, "", 0.0)
    heard: list[float] = []
    begin = time.monotonic()

    async def follow(name: str, client: Discovery) -> None:
        view = views[name]
        assert view is not None
        lives = {one.incarnation for one in view.ranks}
        while lives & {one.incarnation for one in view.ranks}:
            with suppress(DiscoveryError):
                view = await client.watch(name, view.version, 30.0) or view
        heard.append(time.monotonic() - begin)

    followers = [
        asyncio.create_task(follow(name, clients.clients[i % NUM_CLIENTS]))
        for i, name in enumerate(watched)
        if views.get(name) is not None
    ]
    await asyncio.sleep(0.2)
    calls: list[Callable[[], Awaitable[Any]]] = []
    begin = time.monotonic()
    for rank in range(RANKS):
        for name in restarted:
            record = records[name, rank] = new_record(name, rank, layout)
            calls.append(lambda r=record: clients.of(r).register(r, LONG_S))  # type: ignore[misc]
    await clients.all(calls)
    took_s = time.monotonic() - begin
    _, pending = await asyncio.wait(followers, timeout=30.0) if followers else (set(), set())
    for task in pending:
        task.cancel()
    return {
        "restarted_ranks": len(calls),
        "restart_s": round(took_s, 2),
        "restart_heard_p99_ms": quantile_ms(heard, 0.99),
        "restart_unheard": len(pending),
    }


def run_discovery(kind: str, sizes: list[int], window_s: float) -> Result:
    rows = []
    for size in sizes:
        with service(kind) as (url, process):
            row = asyncio.run(measure_discovery(kind, url, process, size, window_s))
        say(f"{kind}: {row}")
        rows.append(row)
    exponents = growth(
        rows, "ranks", {"renew_cores": MIN_CORES, "rss_bytes": MIN_BYTES, "list_cpu_ms": 20.0}
    )
    last = rows[-1]
    bars = bars_of(kind, exponents)
    bars += [
        {"bar": f"{kind}: every instance is complete", "value": last["complete"],
         "limit": last["instances"], "holds": last["complete"] == last["instances"]},
        {"bar": f"{kind}: no call is refused", "value": last["refused"], "limit": 0,
         "holds": not any(row["refused"] for row in rows)},
        {"bar": f"{kind}: renewals keep up", "value": last["renewals_per_s"],
         "limit": last["renewals_wanted_per_s"],
         "holds": last["renewals_per_s"] >= 0.9 * last["renewals_wanted_per_s"]},
    ]  # fmt: skip
    return {"rows": rows, "exponents": exponents, "bars": bars}
