"""Relay of an event stream. It sends whole events, so that an error event can follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from kvferry.http.api_errors import ApiError
from kvferry.http.sse import EventReader, ServerEvent
from kvferry.router.upstream import (
    MAX_RESPONSE_BYTES,
    OpenResponse,
    Upstream,
    WorkerBroke,
    run_unless_lost,
    translate_errors,
)

EVENTS = "text/event-stream"
DONE = "[DONE]"
ERROR = '{"error"'


def as_received(event: ServerEvent) -> bytes:
    """Return an event's own bytes."""
    return event.raw


class WholeEvents:
    """Splitter of a byte stream into whole events, each passed through ``rewrite``. Pure."""

    def __init__(
        self,
        rewrite: Callable[[ServerEvent], bytes] = as_received,
        most_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._rewrite = rewrite
        self._reader = EventReader(most_bytes)
        self._last = ""
        self.num_events = 0

    def take(self, data: bytes) -> bytes:
        """Return the events that these bytes complete; raise ``ValueError`` if one is too long."""
        events = list(self._reader.feed(data))
        for event in events:
            self.num_events += event.data is not None
            self._last = self._last if event.data is None else event.data
        return b"".join(self._rewrite(event) for event in events)

    @property
    def ended(self) -> bool:
        """Whether the last event marks the end of the stream, or an error."""
        return self._last == DONE or self._last.startswith(ERROR)


async def begin(
    request: web.Request, headers: dict[str, str], worker_headers: Mapping[str, str]
) -> web.StreamResponse:
    """Begin the client's stream, with the type of the worker's."""
    kind = worker_headers.get("Content-Type", EVENTS)
    response = web.StreamResponse(headers=headers | {"Content-Type": kind})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    return response


async def relay(
    response: web.StreamResponse, opened: OpenResponse, events: WholeEvents, deadline: float
) -> web.StreamResponse:
    """Relay a worker's stream; if it breaks, end the client's with an error event."""
    error = await _send(opened, events, response, deadline)
    if events.ended:
        await response.write_eof()
        return response
    broken = ApiError(502, f"the {opened.worker} ended its response early", code="worker_failed")
    return await end_with(response, error or broken)


async def end_with(response: web.StreamResponse, error: ApiError) -> web.StreamResponse:
    """End the client's stream with an error event."""
    await response.write(error.event())
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
