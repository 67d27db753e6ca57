"""A pending answer: one caller's job at the engine, and the pieces of its answer as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from msgspec.structs import replace

from kvferry.http.api_errors import ApiError
from kvferry.reference.api.bodies import Ask
from kvferry.reference.api.failures import of_failure
from kvferry.reference.api.rooms import RoomAsker
from kvferry.reference.worker.jobs import (
    AnswerPiece,
    JobFailed,
    Origin,
    RoomEnd,
    ServeJob,
    TransferAccount,
)
from kvferry.reference.worker.loop import EngineLoop
from kvferry.telemetry.logs.context import current

# The engine watches the deadlines itself; this is for an engine that is stuck.
GRACE_S = 5.0
# How long an answer that is complete waits to hear how its transfer went.
END_S = 1.0


class PendingAnswer:
    """Belongs to the event loop; ``end`` it whatever happens."""

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
        # However long a caller would hold pages, they are the worker's.
        transfer_s = min(wanted_s or deadline_s, request_s)
        now = time.monotonic()
        asked_as, traceparent = current()
        self._job = ServeJob(
            request=ask.request,
            ticket=ask.ticket,
            tell=self._tell,
            begun_at=now,
            deadline=now + request_s,
            transfer_deadline=now + transfer_s,
            report=TransferAccount(room=None, source=Origin.RECOMPUTED) if ask.is_local else None,
            asked_as=asked_as,
            traceparent=traceparent,
        )
        loop.submit(self._job)

    def _tell(self, event: AnswerPiece | JobFailed) -> None:
        """On the engine's thread. The server may be closed by the time it has something to say."""
        with contextlib.suppress(RuntimeError):
            self._here.call_soon_threadsafe(self._news.put_nowait, event)

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """To the last one, which knows how the transfer went; raises ``ApiError``."""
        while True:
            piece = await self._next()
            if piece.prefill and piece.report is not None and piece.report.room is not None:
                asking = self._asker.end(*piece.prefill, piece.report.room)
                self._end = asyncio.create_task(asking)
            if piece.finish is None:
                yield piece
                continue
            end = await _unless_late(self._end) if self._end is not None else None
            if end is not None and piece.report is not None:
                told = replace(piece.report, mode=end.mode, num_bytes=end.num_bytes)
                piece = replace(piece, report=told)
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
            raise of_failure(event)
        return event

    def end(self) -> None:
        """The caller has its answer, or has left."""
        if self._end is not None:
            self._end.cancel()
        # Without effect on what was answered.
        self._loop.cancel(self._job)


async def _unless_late(asking: asyncio.Task[RoomEnd | None]) -> RoomEnd | None:
    done, _ = await asyncio.wait({asking}, timeout=END_S)
    return asking.result() if done else None
