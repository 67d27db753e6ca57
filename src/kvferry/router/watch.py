"""The watch that keeps the pool true: asks discovery who there is, each worker how it is.

While the discovery service is away, who was known stays known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from kvferry import ClusterKey, InputError, InstanceView, KvferryError, RequestSigner, Summaries
from kvferry.router.options import RouterOptions, checked_url
from kvferry.router.upstream import ended, new_session
from kvferry.router.worker_pool import (
    Announced,
    Health,
    Unwell,
    Worker,
    WorkerPool,
    WorkerRole,
)
from kvferry.security.signing import Introduction, new_nonce

log = logging.getLogger("kvferry.router")

LISTEN_S = 3.0
MAX_BYTES = 64 << 20
UNUSABLE = (aiohttp.ClientError, OSError, ValueError, KvferryError, UnicodeDecodeError)


AskHealth = Callable[[aiohttp.ClientSession, Worker, str], Awaitable[Health]]


class Watch:
    """Polls for as long as it runs. ``ask`` asks a worker how it is, with a nonce."""

    def __init__(
        self,
        options: RouterOptions,
        pool: WorkerPool,
        key: ClusterKey | None,
        ask: AskHealth,
    ) -> None:
        self._options = options
        self._ask = ask
        self._pool = pool
        self._key = key.http if key is not None else None
        self._signer = RequestSigner((options.discovery or "").rstrip("/"), key)
        self._known: dict[str, tuple[str, Announced | None]] = {}
        self._away = False
        self._asking: dict[object, asyncio.Task[None]] = {}
        self._alarms: dict[Worker, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Look around until cancelled."""
        async with new_session() as session:
            try:
                while True:
                    self._look(session)
                    await asyncio.sleep(self._options.poll_s)
            finally:
                await ended(*self._asking.values())
                for alarm in self._alarms.values():
                    alarm.cancel()

    def _look(self, session: aiohttp.ClientSession) -> None:
        """Ask whoever has answered the last question. A slow one holds nobody up."""
        if self._options.discovery is not None:
            self._begin("discovery", self._listen, session, self._options.discovery)
        for worker in self._pool.workers:
            self._begin(worker, self._check, session, worker)

    def _begin(
        self, whom: object, ask: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        if whom not in self._asking:
            task = self._asking[whom] = asyncio.create_task(ask(*args))
            task.add_done_callback(lambda _: self._asking.pop(whom))

    # ------------------------------------------------------------ the discovery service

    async def _listen(self, session: aiohttp.ClientSession, base: str) -> None:
        try:
            async with asyncio.timeout(LISTEN_S):
                announced = await self._announced(session, base)
        except (*UNUSABLE, TimeoutError) as error:
            if not self._away:
                log.warning("discovery-away url=%s message=%r", base, str(error))
            self._away = True
            return
        if self._away:
            log.info("discovery-back url=%s", base)
        self._away = False
        self._pool.hear(announced)

    async def _announced(self, session: aiohttp.ClientSession, base: str) -> list[Announced]:
        listing = msgspec.json.decode(
            await self._get(session, base, "/v1/instances"), type=Summaries
        )
        versions = {entry.name: entry.version for entry in listing.instances if entry.complete}
        for name, version in versions.items():
            if self._known.get(name, ("",))[0] != version:
                path = f"/v1/instances/{quote(name, safe='')}"
                view = msgspec.json.decode(await self._get(session, base, path), type=InstanceView)
                self._known[name] = (version, announced(view))
        self._known = {name: self._known[name] for name in versions}
        return [entry for _, entry in self._known.values() if entry is not None]

    async def _get(self, session: aiohttp.ClientSession, base: str, path: str) -> bytes:
        headers = await self._signer.authorization(session, "GET", path)
        url = URL(base.rstrip("/") + path, encoded=True)
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            data = await response.content.read(MAX_BYTES)
            if response.status == 401:
                # It may have restarted; the next look asks who is there.
                self._signer.forget()
            if response.status != 200:
                raise ValueError(f"status {response.status}: {data[:200]!r}")
            return data

    # ------------------------------------------------------------ the workers

    async def _check(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        was_up, now = worker.up, asyncio.get_running_loop().time
        nonce = new_nonce()
        try:
            async with asyncio.timeout(self._options.check_s):
                health = await self._ask(session, worker, nonce)
                self._demand_proof(health, nonce)
            self._pool.well(worker, health, now())
            if worker.up:
                self._set_alarm(worker)
        except (aiohttp.ClientConnectorError, Unwell) as error:
            self._pool.missed(worker, str(error), now(), sure=True)
        except (*UNUSABLE, TimeoutError) as error:
            problem = str(error) or "it does not answer"
            self._pool.missed(worker, problem, now(), sure=False)
        if worker.up != was_up:
            log.info("worker url=%s up=%s problem=%r", worker.url, worker.up, worker.problem)

    def _demand_proof(self, health: Health, nonce: str) -> None:
        """A worker that has a key must have ours; one without needs no signature."""
        told = Introduction(health.life, health.proof)
        if self._key is not None and told.life and not told.fits(self._key, nonce):
            raise ValueError("it has another cluster key; give both the same file")

    def _set_alarm(self, worker: Worker) -> None:
        """Give it up when its time is over, which need not be at the end of a check."""
        loop, when = asyncio.get_running_loop(), worker.well_at + self._options.lost_s
        if (former := self._alarms.get(worker)) is not None:
            former.cancel()
        self._alarms[worker] = loop.call_at(when, self._ring, worker, when)

    def _ring(self, worker: Worker, when: float) -> None:
        """Its time is over, unless this process did not run either and could not ask it."""
        loop = asyncio.get_running_loop()
        late_s = loop.time() - when
        if late_s > self._options.poll_s:
            again = loop.time() + self._options.left_out_s
            self._alarms[worker] = loop.call_at(again, self._ring, worker, again)
            return
        del self._alarms[worker]
        self._pool.given_up(worker, when)


def announced(view: InstanceView) -> Announced | None:
    """What an instance says of itself, if it is a worker with an address."""
    for rank in view.ranks:
        url, role = rank.metadata.get("http"), rank.metadata.get("role")
        if url and role in set(WorkerRole):
            try:
                name = rank.metadata.get("instance", view.name)
                return Announced(checked_url(url), WorkerRole(role), name)
            except InputError:
                log.warning("bad-address instance=%s url=%r", view.name, url)
    return None
