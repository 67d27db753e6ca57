"""A relay of a stream of events: whole events only, so that an error can be added to it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.http.api_errors import ApiError
from kvferry.http.sse import EventReader
from kvferry.router.upstream import (
    MAX_ANSWER_BYTES,
    Opened,
    Upstream,
    WorkerBroke,
    translated,
    unless_lost,
)

DONE = "[DONE]"
ERROR = '{"error"'


class WholeEvents:
    """The events of a stream, each passed on when it is complete. Pure."""

    def __init__(self, most_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._reader = EventReader(most_bytes)
        self._last = ""

    def take(self, data: bytes) -> bytes:
        """What these bytes complete; ``ValueError`` if an event has no end."""
        events = list(self._reader.feed(data))
        for event in events:
            self._last = self._last if event.data is None else event.data
        return b"".join(event.raw for event in events)

    @property
    def ended(self) -> bool:
        """Whether the stream has said that it is complete, or why not."""
        return self._last == DONE or self._last.startswith(ERROR)


async def relay(
    request: web.Request, opened: Opened, headers: dict[str, str], deadline: float
) -> web.StreamResponse:
    """Send the stream on as it comes. What breaks it is its last event."""
    kind = opened.response.headers.get("Content-Type", "text/event-stream")
    response = web.StreamResponse(headers=headers | {"Content-Type": kind})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    events = WholeEvents()
    error = await _send(opened, events, response, deadline)
    if not events.ended:
        broken = ApiError(502, f"the {opened.worker} ended its answer early", code="worker_failed")
        await response.write((error or broken).event())
    await response.write_eof()
    return response


async def _send(
    opened: Opened, events: WholeEvents, response: web.StreamResponse, deadline: float
) -> ApiError | None:
    try:
        async with asyncio.timeout_at(deadline):
            with opened.worker.asked():
                await unless_lost(opened.worker, _copy(opened, events, response))
    except TimeoutError:
        return ApiError(504, "the answer was not complete at its deadline", code="deadline")
    except WorkerBroke as broke:
        return ApiError(502, str(broke), code="worker_failed")
    return None


async def _copy(opened: Opened, events: WholeEvents, response: web.StreamResponse) -> None:
    async for data in Upstream.rest(opened):
        with translated(opened.worker):
            whole = events.take(data)
        if whole:
            await response.write(whole)
