"""Requests to one worker: a response that has begun, or the reason why there is none.

Translates aiohttp's exceptions. Each request has its own connection, so that a broken connection
concerns only this request and this worker.
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
from kvferry.http.api_errors import JSON, ApiError, parse_error
from kvferry.http.sse import EventReader
from kvferry.router.worker_pool import Worker, WorkerRole
from kvferry.security.signing import sign
from kvferry.telemetry.logs.context import onward

T = TypeVar("T")

CONNECT_S = 5.0
MAX_RESPONSE_BYTES = 64 << 20
TRANSFER_FAILED = "kv_transfer_failed"
# The worker lost a rank for an unknown reason, in a step that ran the request.
WORKER_LOST = "worker_lost"
WORKER_DRAINING = "worker_draining"
# Another worker would fail in the same way.
REQUEST_FAILED = ("sampling_failed", "request_broke_worker")
# Of a worker that has as many requests as it takes. Another one may have capacity.
FULL = 429
# Of an overloaded worker that could not read the request in time.
SLOW = 408


class FaultDomain(Enum):
    """Cause of a failed attempt; the forwarder decides by it what to try next.

    LOST means that a worker vanished while it had the request. Either somebody killed it or the
    request did; the router cannot tell. REJECTED means that a worker accepts no requests any more.
    FULL is no failure: the worker takes no more requests now.
    """

    REQUEST = auto()
    TRANSFER = auto()
    WORKER = auto()
    LOST = auto()
    REJECTED = auto()
    FULL = auto()


class FailedAttempt(NamedTuple):
    """An attempt without a response. ``document`` is the worker's error body, if any."""

    worker: Worker
    fault_domain: FaultDomain
    message: str
    status: int = 502
    code: str = "worker_failed"
    document: bytes = b""


def client_error(failure: FailedAttempt) -> ApiError:
    """Return the error for the client after the last failure."""
    return ApiError(failure.status, failure.message, code=failure.code, document=failure.document)


class OpenResponse(NamedTuple):
    """A response that has begun. ``head`` is its whole body, or a stream's first bytes."""

    worker: Worker
    response: aiohttp.ClientResponse
    head: bytes


AttemptOutcome = OpenResponse | FailedAttempt


class WorkerBroke(KvferryError):
    """The worker or its connection failed during a response."""


class NotConnected(WorkerBroke):
    """The connection to the worker failed, so the worker has not seen the request."""


def new_session() -> aiohttp.ClientSession:
    """Return a session with one connection per request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
    )


class Upstream:
    """Requests on behalf of one client. Leaving the block closes all open responses."""

    def __init__(self, session: aiohttp.ClientSession, key: ClusterKey | None = None) -> None:
        self._session = session
        self._key = key.http if key is not None else None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    async def send(
        self,
        worker: Worker,
        path: str,
        body: bytes,
        *,
        stream: bool,
        num_events: int = 1,
        headers: dict[str, str] | None = None,
    ) -> AttemptOutcome:
        """Send a request; return its whole response, or the first ``num_events`` of a stream."""
        more = {"Content-Type": JSON} | (headers or {})
        try:
            work = self._send(worker, path, body, num_events if stream else 0, more)
            return await run_unless_lost(worker, work)
        except NotConnected as error:
            return FailedAttempt(worker, FaultDomain.WORKER, str(error))
        except WorkerBroke as error:
            return FailedAttempt(worker, FaultDomain.LOST, str(error))

    async def _send(
        self, worker: Worker, path: str, body: bytes, num_events: int, headers: dict[str, str]
    ) -> AttemptOutcome:
        """Send a request. With ``num_events`` 0 the response is no stream, and is read whole."""
        with translate_errors(worker), contextlib.ExitStack() as opened:
            response = await self._session.post(
                worker.url + path,
                # As a file, so that aiohttp sends a large body in pieces.
                data=io.BytesIO(body),
                headers=headers | self._headers(worker, "POST", path, body),
                allow_redirects=False,
            )
            opened.callback(response.close)
            if response.status == 401:
                # It has restarted or has another key; the next health check shows which.
                worker.mark_down("the worker rejects this router's signature")
            if response.status != 200:
                return failed_attempt(worker, response.status, await _read_all(response))
            if not num_events:
                return OpenResponse(worker, response, await _read_all(response))
            head = await _read_events(response, num_events)
            if not head:
                raise WorkerBroke(f"the {worker} sent an empty response")
            self._open.push(opened.pop_all())
            return OpenResponse(worker, response, head)

    def _headers(self, worker: Worker, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Return the headers for the request id, and the signature if there is a key."""
        if self._key is None or not worker.life:
            return onward()
        signed = sign(self._key, worker.life, method, path, body, time.time())
        return onward() | {"Authorization": signed}

    @staticmethod
    async def rest(opened: OpenResponse) -> AsyncIterator[bytes]:
        """Yield the bytes of a stream from its beginning."""
        yield opened.head
        while data := await _next(opened):
            yield data


async def _next(opened: OpenResponse) -> bytes:
    with translate_errors(opened.worker):
        return await opened.response.content.readany()


@contextlib.contextmanager
def translate_errors(worker: Worker) -> Iterator[None]:
    """Raise aiohttp's errors as ``WorkerBroke``, and mark the worker down."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        worker.mark_down(reason)
        kind = NotConnected if isinstance(error, aiohttp.ClientConnectorError) else WorkerBroke
        raise kind(f"the {worker} is gone: {reason}") from None


async def run_unless_lost(worker: Worker, work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine until it ends or the worker is lost."""
    running, lost = asyncio.create_task(work), asyncio.create_task(worker.lost.wait())
    try:
        await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise WorkerBroke(f"the {worker} no longer responds")
    finally:
        await cancel_and_wait(running, lost)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read_events(response: aiohttp.ClientResponse, num_events: int) -> bytes:
    """Return the beginning of a stream, with at least this many events unless it ends earlier."""
    reader, data, num_read = EventReader(MAX_RESPONSE_BYTES), bytearray(), 0
    while num_read < num_events and (chunk := await response.content.readany()):
        data += chunk
        num_read += sum(event.data is not None for event in reader.feed(chunk))
    return bytes(data)


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while chunk := await response.content.readany():
        data += chunk
        if len(data) > MAX_RESPONSE_BYTES:
            raise ValueError(f"the response is larger than {MAX_RESPONSE_BYTES >> 20} MiB")
    return bytes(data)


def failed_attempt(worker: Worker, status: int, document: bytes) -> FailedAttempt:
    """Return the meaning of a worker's error response."""
    code, message = parse_error(document)
    if not message:
        return FailedAttempt(
            worker, FaultDomain.WORKER, f"the {worker} answered with status {status}"
        )
    if status == 401:
        # A matter between worker and router, not of the client.
        return FailedAttempt(
            worker, FaultDomain.WORKER, f"the {worker} rejects the router: {message}", code=code
        )
    fault_domain = FaultDomain.WORKER
    if code == TRANSFER_FAILED:
        fault_domain = FaultDomain.TRANSFER
    elif code == WORKER_LOST:
        fault_domain = FaultDomain.LOST
    elif status == FULL:
        fault_domain = FaultDomain.FULL
    elif code in REQUEST_FAILED or (400 <= status < 500 and status != SLOW):
        fault_domain = FaultDomain.REQUEST
    return FailedAttempt(worker, fault_domain, message, status, code, document)


def is_prefill_failure(failure: FailedAttempt) -> bool:
    """Return whether another prefill worker, or local prefill, may help."""
    return failure.fault_domain is FaultDomain.TRANSFER or failure.worker.role is WorkerRole.PREFILL
