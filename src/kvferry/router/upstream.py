"""A request to one worker: an answer that has begun, or why there is none.

Foreign exceptions end here. Each request has a connection of its own, so that a
connection that breaks says something about this request and this worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import aiohttp

from kvferry import ClusterKey, KvferryError
from kvferry.http.api_errors import JSON, parse_error
from kvferry.router.worker_pool import Worker, WorkerRole
from kvferry.security.signing import sign
from kvferry.telemetry.logs.context import onward

T = TypeVar("T")

CONNECT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20
TRANSFER_FAILED = "kv_transfer_failed"
# A worker lost a rank, for a reason it does not know, in a step that ran the request.
WORKER_LOST = "worker_lost"
# Another worker would compute the same and fail the same way, or end as the first one did.
REQUEST_FAILED = ("sampling_failed", "request_broke_worker")
# A worker that says so has too much to do; another may not.
BUSY = (408, 429)


class FaultDomain(Enum):
    """Cause of a failed attempt, by which the forwarder decides what to try next.

    LOST: a worker vanished while it had the request. It may have been killed, and the request
    may have ended it; from outside the two look alike.
    """

    REQUEST = auto()
    TRANSFER = auto()
    WORKER = auto()
    LOST = auto()


class Failed(NamedTuple):
    """A worker gave no answer. ``document`` is its own error, if it gave one."""

    worker: Worker
    fault_domain: FaultDomain
    message: str
    status: int = 502
    code: str = "worker_failed"
    document: bytes = b""


class Opened(NamedTuple):
    """An answer that has begun. ``head`` is all of it, or its first bytes if it is a stream."""

    worker: Worker
    response: aiohttp.ClientResponse
    head: bytes


class WorkerBroke(KvferryError):
    """The worker, or the way to it, failed while it was answering."""


class NotConnected(WorkerBroke):
    """No connection to the worker could be made, so it has not seen the request."""


def new_session() -> aiohttp.ClientSession:
    """Connections to workers, as many as there are requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
    )


class Upstream:
    """Requests on behalf of one client. Leaving the block ends whatever is still open."""

    def __init__(self, session: aiohttp.ClientSession, key: ClusterKey | None = None) -> None:
        self._session = session
        self._key = key.http if key is not None else None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    async def ask(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        stream: bool,
        headers: dict[str, str] | None = None,
    ) -> Opened | Failed:
        """Send a request and wait until its answer is there, or has begun."""
        more = {"Content-Type": JSON} | (headers or {})
        try:
            with worker.asked():
                return await unless_lost(worker, self._ask(worker, path, body, stream, more))
        except NotConnected as error:
            return Failed(worker, FaultDomain.WORKER, str(error))
        except WorkerBroke as error:
            return Failed(worker, FaultDomain.LOST, str(error))

    async def _ask(
        self, worker: Worker, path: str, body: bytes, stream: bool, headers: dict[str, str]
    ) -> Opened | Failed:
        with translated(worker):
            response = await self._session.post(
                worker.url + path,
                # In pieces, so that a large body does not hold up everybody else.
                data=io.BytesIO(body),
                headers=headers | self._headers(worker, "POST", path, body),
                allow_redirects=False,
            )
            self._open.callback(response.close)
            if response.status == 401:
                # It has restarted, or has another key; it says which at the next look.
                worker.failed("it does not take this router's signature")
            if response.status != 200:
                return _refusal(worker, response.status, await _read_all(response))
            if not stream:
                return Opened(worker, response, await _read_all(response))
            head = await response.content.readany()
            if not head:
                raise WorkerBroke(f"the {worker} ended its answer before it began")
            return Opened(worker, response, head)

    async def give_up(self, worker: Worker, room: int) -> None:
        """Tell a prefill worker that nobody will come for a room, so that it need not wait.

        A worker that has no such path releases the room at its deadline instead.
        """
        path = f"/kvferry/rooms/{room}"
        headers = self._headers(worker, "DELETE", path)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with (
                asyncio.timeout(CONNECT_S),
                self._session.delete(worker.url + path, headers=headers, allow_redirects=False),
            ):
                pass

    def _headers(self, worker: Worker, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """The request's id, and what lets it in at a worker that has the cluster's key."""
        if self._key is None or not worker.life:
            return onward()
        signed = sign(self._key, worker.life, method, path, body, time.time())
        return onward() | {"Authorization": signed}

    @staticmethod
    async def rest(opened: Opened) -> AsyncIterator[bytes]:
        """The bytes of a stream, from its beginning."""
        yield opened.head
        while data := await _next(opened):
            yield data


async def _next(opened: Opened) -> bytes:
    with translated(opened.worker):
        return await opened.response.content.readany()


@contextlib.contextmanager
def translated(worker: Worker) -> Iterator[None]:
    """Foreign errors as ours; a worker that can't be reached is left out from now on."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = str(error) or type(error).__name__
        worker.failed(why)
        kind = NotConnected if isinstance(error, aiohttp.ClientConnectorError) else WorkerBroke
        raise kind(f"the {worker} is gone: {why}") from None


async def unless_lost(worker: Worker, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, unless the worker falls silent meanwhile."""
    doing, lost = asyncio.create_task(work), asyncio.create_task(worker.lost.wait())
    try:
        await asyncio.wait({doing, lost}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise WorkerBroke(f"the {worker} does not answer any more")
    finally:
        await ended(doing, lost)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while part := await response.content.readany():
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise ValueError("the answer is too large")
    return bytes(data)


def _refusal(worker: Worker, status: int, document: bytes) -> Failed:
    code, message = parse_error(document)
    if not message:
        return Failed(worker, FaultDomain.WORKER, f"the {worker} answered with status {status}")
    if status == 401:
        # The worker's business with this router, and not the client's.
        return Failed(worker, FaultDomain.WORKER, f"the {worker} refuses: {message}", code=code)
    fault_domain = FaultDomain.WORKER
    if code == TRANSFER_FAILED:
        fault_domain = FaultDomain.TRANSFER
    elif code == WORKER_LOST:
        fault_domain = FaultDomain.LOST
    elif code in REQUEST_FAILED or (400 <= status < 500 and status not in BUSY):
        fault_domain = FaultDomain.REQUEST
    return Failed(worker, fault_domain, message, status, code, document)


def is_prefills(failure: Failed) -> bool:
    """Whether another prefill worker, or none, may help."""
    return failure.fault_domain is FaultDomain.TRANSFER or failure.worker.part is WorkerRole.PREFILL
