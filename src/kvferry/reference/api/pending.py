"""Answers under way: the pieces of one job's answer, and how its room was written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from msgspec.structs import replace
from yarl import URL

from kvferry import ClusterKey, Room
from kvferry.http.api_errors import ApiError
from kvferry.reference.api.bodies import Ask
from kvferry.reference.worker.jobs import (
    AnswerPiece,
    JobFailed,
    Origin,
    RoomEnd,
    ServeJob,
    TransferAccount,
    Trouble,
)
from kvferry.reference.worker.loop import EngineLoop
from kvferry.security.signing import sign
from kvferry.telemetry.logs.context import current, onward

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


class PendingAnswer:
    """One caller's job at the engine. Belongs to the event loop; call ``end`` in any case."""

    def __init__(
        self, loop: EngineLoop, asker: RoomAsker, ask: Ask, *, deadline_s: float, request_s: float
    ) -> None:
        self._loop = loop
        self._asker = asker
        self._patience_s = request_s + GRACE_S
        self._here = asyncio.get_running_loop()
        self._news: asyncio.Queue[AnswerPiece | JobFailed] = asyncio.Queue()
        self._end: asyncio.Task[RoomEnd | None] | None = None
        wanted_s = ask.ticket.deadline_s if ask.ticket else None
        now = time.monotonic()
        asked_as, traceparent = current()
        self._job = ServeJob(
            request=ask.request,
            ticket=ask.ticket,
            tell=self._tell,
            begun_at=now,
            deadline=now + request_s,
            # No caller holds the worker's pages for longer than a request may take.
            transfer_deadline=now + min(wanted_s or deadline_s, request_s),
            report=TransferAccount(room=None, source=Origin.RECOMPUTED) if ask.is_local else None,
            asked_as=asked_as,
            traceparent=traceparent,
        )
        loop.submit(self._job)

    def _tell(self, event: AnswerPiece | JobFailed) -> None:
        """Called on the engine's thread; the server may be closed by then."""
        with contextlib.suppress(RuntimeError):
            self._here.call_soon_threadsafe(self._news.put_nowait, event)

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """Yield the pieces up to the last one, which reports the transfer; raise ``ApiError``."""
        while True:
            piece = await self._next()
            if piece.prefill and piece.report is not None and piece.report.room is not None:
                asking = self._asker.end(*piece.prefill, piece.report.room)
                self._end = asyncio.create_task(asking)
            if piece.finish is None:
                yield piece
                continue
            end = await self._room_end()
            if end is not None and piece.report is not None:
                report = replace(piece.report, mode=end.mode, num_bytes=end.num_bytes)
                piece = replace(piece, report=report)
            yield piece
            return

    async def _next(self) -> AnswerPiece:
        try:
            async with asyncio.timeout(self._patience_s):
                event = await self._news.get()
        except TimeoutError:
            message = "the engine does not answer; see its log"
            raise ApiError(504, message, code="timeout") from None
        if isinstance(event, JobFailed):
            status, code = _STATUS[event.trouble]
            raise ApiError(status, event.message, code=code)
        return event

    async def _room_end(self) -> RoomEnd | None:
        if self._end is None:
            return None
        done, _ = await asyncio.wait({self._end}, timeout=END_S)
        return self._end.result() if done else None

    def end(self) -> None:
        """Stop the job, unless it was answered: the caller has its answer, or has left."""
        if self._end is not None:
            self._end.cancel()
        self._loop.cancel(self._job)
