"""Relay of an event stream. It sends whole events, so that an error event can follow."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.http.api_errors import ApiError
from kvferry.http.sse import EventReader
from kvferry.router.upstream import (
    MAX_RESPONSE_BYTES,
    OpenResponse,
    Upstream,
    WorkerBroke,
    run_unless_lost,
    translate_errors,
)

DONE = "[DONE]"
ERROR = '{"error"'


class WholeEvents:
    """Splitter of a byte stream into whole events. Pure."""

    def __init__(self, most_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._reader = EventReader(most_bytes)
        self._last = ""

    def take(self, data: bytes) -> bytes:
        """Return the events that these bytes complete; raise ``ValueError`` if one is too long."""
        events = list(self._reader.feed(data))
        for event in events:
            self._last = self._last if event.data is None else event.data
        return b"".join(event.raw for event in events)

    @property
    def ended(self) -> bool:
        """Whether the last event marks the end of the stream, or an error."""
        return self._last == DONE or self._last.startswith(ERROR)


async def relay(
    request: web.Request, opened: OpenResponse, headers: dict[str, str], deadline: float
) -> web.StreamResponse:
    """Relay the stream; if it breaks, end it with an error event."""
    kind = opened.response.headers.get("Content-Type", "text/event-stream")
    response = web.StreamResponse(headers=headers | {"Content-Type": kind})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    events = WholeEvents()
    error = await _send(opened, events, response, deadline)
    if not events.ended:
        broken = ApiError(
            502, f"the {opened.worker} ended its response early", code="worker_failed"
        )
        await response.write((error or broken).event())
    await response.write_eof()
    return response


async def _send(
    opened: OpenResponse, events: WholeEvents, response: web.StreamResponse, deadline: float
) -> ApiError | None:
    try:
        async with asyncio.timeout_at(deadline):
            with opened.worker.count_request():
                await run_unless_lost(opened.worker, _copy(opened, events, response))
    except TimeoutError:
        return ApiError(504, "the response was not complete at its deadline", code="deadline")
    except WorkerBroke as broke:
        return ApiError(502, str(broke), code="worker_failed")
    return None


async def _copy(opened: OpenResponse, events: WholeEvents, response: web.StreamResponse) -> None:
    async for data in Upstream.rest(opened):
        with translate_errors(opened.worker):
            whole = events.take(data)
        if whole:
            await response.write(whole)
