"""Polling of the discovery service and of every worker's health, to keep the pool up to date.

While the discovery service is unreachable, the known workers stay in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from kvferry import ClusterKey, Discovery, DiscoveryError, InputError, InstanceView, KvferryError
from kvferry.router.options import RouterOptions, checked_url
from kvferry.router.upstream import cancel_and_wait, new_session
from kvferry.router.worker_pool import (
    AnnouncedWorker,
    Worker,
    WorkerHealth,
    WorkerPool,
    WorkerRole,
    WorkerUnhealthy,
)
from kvferry.security.signing import Introduction, new_nonce

log = logging.getLogger("kvferry.router")

DISCOVERY_TIMEOUT_S = 3.0
# Views that are asked for at once.
MAX_LOOKUPS = 32
UNUSABLE = (aiohttp.ClientError, OSError, ValueError, KvferryError, UnicodeDecodeError)


CheckHealth = Callable[[aiohttp.ClientSession, Worker, str], Awaitable[WorkerHealth]]


class WorkerWatch:
    """Polls while ``run`` runs. ``check`` requests a worker's health, with a nonce."""

    def __init__(
        self,
        options: RouterOptions,
        pool: WorkerPool,
        discovery: Discovery | None,
        key: ClusterKey | None,
        check: CheckHealth,
    ) -> None:
        self._options = options
        self._check_health = check
        self._pool = pool
        self._key = key.http if key is not None else None
        self._discovery = discovery
        self._known: dict[str, tuple[str, AnnouncedWorker | None]] = {}
        self._is_unreachable = False
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._timers: dict[Worker, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        async with new_session() as session:
            try:
                while True:
                    self._poll(session)
                    await asyncio.sleep(self._options.poll_s)
            finally:
                await cancel_and_wait(*self._tasks.values())
                for timer in self._timers.values():
                    timer.cancel()

    def _poll(self, session: aiohttp.ClientSession) -> None:
        """Start the next request to each party; skip those whose last one still runs."""
        if self._discovery is not None:
            self._start("discovery", self._list_workers, self._discovery)
        for worker in self._pool.workers:
            self._start(worker, self._check, session, worker)

    def _start(
        self, key: object, request: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(request(*args))
            task.add_done_callback(lambda _: self._tasks.pop(key))

    # ------------------------------------------------------------ the discovery service

    async def _list_workers(self, discovery: Discovery) -> None:
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                announced = await self._announced(discovery)
        except (DiscoveryError, TimeoutError) as error:
            if not self._is_unreachable:
                log.warning("discovery-unreachable url=%s error=%r", discovery, str(error))
            self._is_unreachable = True
            return
        if self._is_unreachable:
            log.info("discovery-reachable url=%s", discovery)
        self._is_unreachable = False
        self._pool.update_listed(announced)

    async def _announced(self, discovery: Discovery) -> list[AnnouncedWorker]:
        listed = (await discovery.list()).instances
        versions = {entry.name: entry.version for entry in listed if entry.complete}
        at_once = asyncio.Semaphore(MAX_LOOKUPS)

        async def look_up(name: str) -> None:
            async with at_once:
                self._known[name] = (versions[name], await _worker_of(discovery, name))

        known = {name: version for name, (version, _) in self._known.items()}
        changed = [name for name, version in versions.items() if known.get(name) != version]
        await asyncio.gather(*map(look_up, changed))
        self._known = {name: self._known[name] for name in versions}
        return [entry for _, entry in self._known.values() if entry is not None]

    # ------------------------------------------------------------ the workers

    async def _check(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        was_up, now = worker.up, asyncio.get_running_loop().time
        nonce = new_nonce()
        try:
            async with asyncio.timeout(self._options.check_s):
                health = await self._check_health(session, worker, nonce)
                self._check_proof(health, nonce)
            self._pool.mark_up(worker, health, now())
            if worker.up:
                self._set_timer(worker)
        except (aiohttp.ClientConnectorError, WorkerUnhealthy) as error:
            self._pool.mark_missed(worker, str(error), now(), sure=True)
        except (*UNUSABLE, TimeoutError) as error:
            problem = str(error) or "no response"
            self._pool.mark_missed(worker, problem, now(), sure=False)
        if worker.up != was_up:
            # Without it the router may let decode compute prompts.
            level = logging.INFO if worker.up else logging.WARNING
            log.log(level, "worker url=%s up=%s error=%r", worker.url, worker.up, worker.problem)

    def _check_proof(self, health: WorkerHealth, nonce: str) -> None:
        """Check that a worker with a cluster key has the router's key."""
        introduction = Introduction(health.life, health.proof)
        if self._key is not None and introduction.life and not introduction.fits(self._key, nonce):
            raise ValueError("the worker has another cluster key; give both the same file")

    def _set_timer(self, worker: Worker) -> None:
        """Mark the worker lost after ``lost_s``, also while a health check is pending."""
        loop, when = asyncio.get_running_loop(), worker.well_at + self._options.lost_s
        if (previous := self._timers.get(worker)) is not None:
            previous.cancel()
        self._timers[worker] = loop.call_at(when, self._on_timer, worker, when)

    def _on_timer(self, worker: Worker, when: float) -> None:
        """Mark the worker lost, unless this process itself did not run and could not check it."""
        loop = asyncio.get_running_loop()
        late_s = loop.time() - when
        if late_s > self._options.poll_s:
            again = loop.time() + self._options.left_out_s
            self._timers[worker] = loop.call_at(again, self._on_timer, worker, again)
            return
        del self._timers[worker]
        self._pool.mark_lost_if_silent(worker, when)


async def _worker_of(discovery: Discovery, name: str) -> AnnouncedWorker | None:
    """Return the worker that an instance announces now, if any."""
    try:
        view = await discovery.watch(name, "", 0.0)
    except DiscoveryError as error:
        if error.fault == "incomplete":
            # It has ended since the list was made.
            return None
        raise
    return announced_worker(view) if view is not None else None


def announced_worker(view: InstanceView) -> AnnouncedWorker | None:
    """Return the worker that an instance announces in its metadata, if any."""
    for rank in view.ranks:
        url, role = rank.metadata.get("http"), rank.metadata.get("role")
        if url and role in set(WorkerRole):
            try:
                name = rank.metadata.get("instance", view.name)
                return AnnouncedWorker(checked_url(url), WorkerRole(role), name)
            except InputError:
                log.warning("bad-address instance=%s url=%r", view.name, url)
    return None
