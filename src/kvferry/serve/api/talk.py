"""One caller's request at the engine: its job, and the pieces of its answer as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from msgspec.structs import replace

from kvferry.serve.api.bodies import Ask
from kvferry.serve.api.errors import ApiError, ErrorType, of_failure
from kvferry.serve.api.rooms import RoomAsker
from kvferry.serve.jobs import Failed, Job, Piece
from kvferry.serve.loop import EngineLoop

# The engine watches the deadlines itself; this is for an engine that is stuck.
GRACE_S = 5.0


class Talk:
    """Belongs to the event loop; ``end`` it whatever happens."""

    def __init__(
        self, loop: EngineLoop, asker: RoomAsker, ask: Ask, *, deadline_s: float, request_s: float
    ) -> None:
        self._loop = loop
        self._asker = asker
        self._patience_s = request_s + GRACE_S
        self._here = asyncio.get_running_loop()
        self._news: asyncio.Queue[Piece | Failed] = asyncio.Queue()
        self._path: asyncio.Task[str | None] | None = None
        wanted_s = ask.ticket.deadline_s if ask.ticket else None
        now = time.monotonic()
        self._job = Job(
            request=ask.request,
            ticket=ask.ticket,
            tell=self._tell,
            begun_at=now,
            deadline=now + request_s,
            transfer_deadline=now + (wanted_s or deadline_s),
        )
        loop.submit(self._job)

    def _tell(self, event: Piece | Failed) -> None:
        """On the engine's thread. The server may be closed by the time it has something to say."""
        with contextlib.suppress(RuntimeError):
            self._here.call_soon_threadsafe(self._news.put_nowait, event)

    async def pieces(self) -> AsyncIterator[Piece]:
        """To the last one, which knows the path of the transfer; raises ``ApiError``."""
        while True:
            piece = await self._next()
            if piece.prefill_url and piece.report is not None:
                asking = self._asker.path(piece.prefill_url, piece.report.room)
                self._path = asyncio.create_task(asking)
            if piece.finish is None:
                yield piece
                continue
            if self._path is not None and piece.report is not None:
                piece = replace(piece, report=replace(piece.report, path=await self._path))
            yield piece
            return

    async def _next(self) -> Piece:
        try:
            event = await asyncio.wait_for(self._news.get(), self._patience_s)
        except TimeoutError:
            message = "the engine does not answer; see its log"
            raise ApiError(504, message, type=ErrorType.SERVER, code="timeout") from None
        if isinstance(event, Failed):
            raise of_failure(event)
        return event

    def end(self) -> None:
        """The caller has its answer, or has left."""
        if self._path is not None:
            self._path.cancel()
        # Without effect on what was answered.
        self._loop.cancel(self._job)
