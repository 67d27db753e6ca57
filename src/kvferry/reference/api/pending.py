"""Answers under way: the pieces of a job's answer, and how its room was written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from msgspec.structs import replace
from yarl import URL

from kvferry import ClusterKey, Room
from kvferry.http.api_errors import ApiError
from kvferry.reference.engine.requests import Produced
from kvferry.reference.worker.jobs import JobFailed, RoomEnd, ServeJob, Trouble
from kvferry.security.signing import sign
from kvferry.telemetry.logs.context import onward

# The engine watches the deadlines itself; this is for an engine that is stuck.
GRACE_S = 5.0
# How long a complete answer waits to learn how its room was written.
END_S = 1.0
# How long a prefill worker waits for the end of a room that it is asked about.
ROOM_S = 30.0
_STATUS = {
    Trouble.INVALID: (400, None),
    Trouble.TRANSFER: (503, "kv_transfer_failed"),
    Trouble.TIMEOUT: (504, "timeout"),
    Trouble.ENDED: (503, "worker_ended"),
    Trouble.LOST: (503, "worker_lost"),
    Trouble.BROKE_WORKER: (500, "request_broke_worker"),
    Trouble.SAMPLING: (500, "sampling_failed"),
}


class RoomAsker:
    """Asks prefill workers how rooms ended: only sources know what was written, and how.

    It asks when an answer begins, so that the reply is there when the answer ends.
    """

    def __init__(self, key: ClusterKey | None = None) -> None:
        self._key = key.http if key is not None else None
        self._session: aiohttp.ClientSession | None = None

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Hold a session while the application runs."""
        timeout = aiohttp.ClientTimeout(total=ROOM_S + 5)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def end(self, url: str, life: str, room: Room) -> RoomEnd | None:
        """Return how a room ended at a worker in that life; None if it does not say."""
        assert self._session is not None
        path = f"/kvferry/rooms/{quote(str(room), safe='')}"
        where, headers = URL(url + path, encoded=True), onward()
        if self._key is not None and life:
            signed = sign(self._key, life, "GET", path, b"", time.time())
            headers["Authorization"] = signed
        try:
            async with self._session.get(where, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.read(), type=RoomEnd)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError):
            return None


async def answer_pieces(job: ServeJob, asker: RoomAsker) -> AsyncGenerator[Produced]:
    """Yield the tokens of a job, and complete its report before the last; raise ``ApiError``."""
    end: asyncio.Task[RoomEnd | None] | None = None
    try:
        while True:
            piece = await _next_piece(job)
            if end is None and job.prefill is not None:
                end = asyncio.create_task(asker.end(*job.prefill, job.room))
            if piece.finish is not None and end is not None and job.report is not None:
                await asyncio.wait({end}, timeout=END_S)
                if end.done() and (told := end.result()) is not None:
                    job.report = replace(job.report, mode=told.mode, num_bytes=told.num_bytes)
            yield piece
            if piece.finish is not None:
                return
    finally:
        if end is not None:
            end.cancel()


async def _next_piece(job: ServeJob) -> Produced:
    try:
        async with asyncio.timeout(job.deadline + GRACE_S - time.monotonic()):
            event = await job.events.get()
    except TimeoutError:
        message = "the engine does not answer; see its log"
        raise ApiError(504, message, code="timeout") from None
    if isinstance(event, JobFailed):
        status, code = _STATUS[event.trouble]
        raise ApiError(status, event.message, code=code)
    return event
