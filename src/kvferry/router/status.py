"""Cluster status for the router's page: the discovery service's, with this router's workers."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from kvferry import ClusterKey, Discovery, KvferryError, RequestSigner, find_status_url
from kvferry.router.upstream import new_session
from kvferry.router.worker_pool import Worker, WorkerPool
from kvferry.telemetry.status import ClusterStatus, WorkerStatus
from kvferry.telemetry.waterfall import Waterfall

# Requests within this time share one answer of the discovery service.
FRESH_S = 0.5
STATUS_TIMEOUT_S, TRACE_TIMEOUT_S = 3.0, 12.0
MAX_BYTES = 64 << 20
UNUSABLE = (aiohttp.ClientError, OSError, ValueError, KvferryError, TimeoutError)


class RouterStatus:
    """A ``StatusSource`` that queries the discovery service. Runs on the router's event loop."""

    def __init__(
        self, discovery: Discovery | None, pool: WorkerPool, key: ClusterKey | None
    ) -> None:
        self._discovery = discovery
        self._pool = pool
        self._key = key
        self._signer = RequestSigner("", key)
        self._session: aiohttp.ClientSession | None = None
        self._last: ClusterStatus | None = None
        self._last_at = -FRESH_S
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def look(self) -> ClusterStatus:
        """Return the discovery service's status; while it is unreachable, the last one and why."""
        async with self._asking:
            if time.monotonic() >= self._last_at + FRESH_S:
                self._last = await self._cluster()
                self._last_at = time.monotonic()
        assert self._last is not None
        workers = tuple(worker_status(worker) for worker in self._pool.workers)
        return msgspec.structs.replace(self._last, served_by="router", workers=workers)

    async def _cluster(self) -> ClusterStatus:
        if self._discovery is None:
            return _nothing("this router has no discovery service, so it shows only its workers")
        try:
            status, body = await self._get("/kvferry/cluster", STATUS_TIMEOUT_S)
            if status == 200:
                return msgspec.json.decode(body, type=ClusterStatus)
            problem = f"the discovery service answered with status {status}"
        except UNUSABLE as error:
            problem = f"cannot reach the discovery service: {str(error) or type(error).__name__}"
        before = self._last or _nothing("")
        return msgspec.structs.replace(before, problem=f"{problem}; the data shown is old")

    async def waterfall(self, room: str) -> Waterfall | None:
        """Return a room's waterfall from the discovery service."""
        try:
            path = f"/kvferry/traces/{quote(room, safe='')}"
            status, body = await self._get(path, TRACE_TIMEOUT_S)
            return msgspec.json.decode(body, type=Waterfall) if status == 200 else None
        except UNUSABLE:
            return None

    async def plan(self, source: str, target: str) -> str:
        """Return the plan between two instances, drawn by the discovery service."""
        path = f"/kvferry/plan?source={quote(source, safe='')}&target={quote(target, safe='')}"
        try:
            status, body = await self._get(path, STATUS_TIMEOUT_S)
        except UNUSABLE as error:
            raise LookupError(f"cannot reach the discovery service: {error}") from None
        if status != 200:
            raise LookupError(
                "the discovery service has no plan for these two instances; check their names"
            )
        return body.decode()

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        if self._discovery is None:
            raise ValueError("this router has no discovery service")
        self._session = self._session or new_session()
        async with asyncio.timeout(timeout_s):
            base = await find_status_url(self._discovery)
            if base != self._signer.base:
                self._signer = RequestSigner(base, self._key)
            headers = await self._signer.authorization(self._session, "GET", path)
            url = URL(base + path, encoded=True)
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                body = await response.read()
                if response.status == 401:
                    self._signer.forget()
                if len(body) > MAX_BYTES:
                    raise ValueError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
                return response.status, body


def _nothing(problem: str) -> ClusterStatus:
    return ClusterStatus(at=time.time(), served_by="router", problem=problem)


def worker_status(worker: Worker) -> WorkerStatus:
    """Return the document of a worker in the pool."""
    return WorkerStatus(
        name=worker.name,
        role=str(worker.role),
        url=worker.url,
        model=worker.model,
        up=worker.up,
        in_flight=worker.in_flight,
        problem=worker.problem,
        max_in_flight=worker.max_in_flight,
    )
