"""The router's lookout: the discovery service's, with the workers that this router knows."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from kvferry import ClusterKey, KvferryError, RequestSigner
from kvferry.router.upstream import new_session
from kvferry.router.worker_pool import Worker, WorkerPool
from kvferry.telemetry.reports import ClusterView, WorkerShown
from kvferry.telemetry.waterfall import Waterfall

T = TypeVar("T")

# Many may look at once, and the discovery service is asked once in so long.
FRESH_S = 0.5
LOOK_S, STORY_S = 3.0, 12.0
MAX_BYTES = 64 << 20
UNUSABLE = (aiohttp.ClientError, OSError, ValueError, KvferryError, TimeoutError)


class RouterStatus:
    """Belongs to the router's event loop."""

    def __init__(self, discovery: str | None, pool: WorkerPool, key: ClusterKey | None) -> None:
        self._base = (discovery or "").rstrip("/")
        self._pool = pool
        self._signer = RequestSigner(self._base, key)
        self._session: aiohttp.ClientSession | None = None
        self._last: ClusterView | None = None
        self._last_at = -FRESH_S
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def look(self) -> ClusterView:
        """The cluster as discovery shows it; while that is away, as it was, and that it is."""
        async with self._asking:
            if time.monotonic() >= self._last_at + FRESH_S:
                self._last = await self._cluster()
                self._last_at = time.monotonic()
        assert self._last is not None
        workers = tuple(_shown(worker) for worker in self._pool.workers)
        return msgspec.structs.replace(self._last, served_by="router", workers=workers)

    async def _cluster(self) -> ClusterView:
        if not self._base:
            return _nothing("this router has no discovery service, so it knows its workers alone")
        try:
            status, body = await self._get("/kvferry/cluster", LOOK_S)
            if status == 200:
                return msgspec.json.decode(body, type=ClusterView)
            problem = f"the discovery service answers with status {status}"
        except UNUSABLE as error:
            problem = f"the discovery service can't be asked: {str(error) or type(error).__name__}"
        before = self._last or _nothing("")
        return msgspec.structs.replace(before, problem=f"{problem}; what is shown is old")

    async def waterfall(self, room: str) -> Waterfall | None:
        """A room's trace, as the discovery service has it."""
        if not self._base:
            return None
        try:
            path = f"/kvferry/traces/{quote(room, safe='')}"
            status, body = await self._get(path, STORY_S)
            return msgspec.json.decode(body, type=Waterfall) if status == 200 else None
        except UNUSABLE:
            return None

    async def plan(self, source: str, target: str) -> str:
        """The plan's picture, as the discovery service draws it."""
        path = f"/kvferry/plan?source={quote(source, safe='')}&target={quote(target, safe='')}"
        try:
            status, body = await self._get(path, LOOK_S)
        except UNUSABLE as error:
            raise LookupError(f"the discovery service can't be asked: {error}") from None
        if status != 200:
            raise LookupError("the discovery service has no plan for these two; check their names")
        return body.decode()

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        self._session = self._session or new_session()
        async with asyncio.timeout(timeout_s):
            headers = await self._signer.authorization(self._session, "GET", path)
            url = URL(self._base + path, encoded=True)
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                body = await response.read()
                if response.status == 401:
                    self._signer.forget()
                if len(body) > MAX_BYTES:
                    raise ValueError("the answer is too large")
                return response.status, body


def _nothing(problem: str) -> ClusterView:
    return ClusterView(
        at=time.time(),
        served_by="router",
        instances=(),
        links=(),
        rooms=(),
        slow=(),
        failures=(),
        problem=problem,
    )


def _shown(worker: Worker) -> WorkerShown:
    return WorkerShown(
        name=worker.name,
        part=str(worker.part),
        url=worker.url,
        model=worker.model,
        up=worker.up,
        in_flight=worker.in_flight,
        problem=worker.problem,
    )
