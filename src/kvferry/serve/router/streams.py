"""Passing a stream of events on, whole events only, so that an error can be added to it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.serve.router.answers import ApiError
from kvferry.serve.router.upstream import Opened, Upstream, WorkerBroke, unless_lost

SEPARATOR = b"\n\n"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'


class Events:
    """Cuts bytes where an event ends, and remembers the last event. Pure."""

    def __init__(self) -> None:
        self._rest = b""
        self.last = b""

    def take(self, data: bytes) -> bytes:
        """The whole events that are there now."""
        whole, separator, self._rest = (self._rest + data).rpartition(SEPARATOR)
        if separator:
            self.last = whole.rpartition(SEPARATOR)[2].lstrip()
        return whole + separator

    @property
    def ended(self) -> bool:
        """Whether the stream has said that it is complete, or why not."""
        return self.last == DONE or self.last.startswith(ERROR)


async def relay(
    request: web.Request, opened: Opened, headers: dict[str, str], deadline: float
) -> web.StreamResponse:
    """Send the stream on as it comes. What breaks it is its last event."""
    kind = opened.response.headers.get("Content-Type", "text/event-stream")
    response = web.StreamResponse(headers=headers | {"Content-Type": kind})
    response.headers["Cache-Control"] = "no-cache"
    await response.prepare(request)
    events = Events()
    error = await _send(opened, events, response, deadline)
    if not events.ended:
        broken = ApiError(502, "worker_failed", f"the {opened.worker} ended its answer early")
        await response.write((error or broken).event())
    await response.write_eof()
    return response


async def _send(
    opened: Opened, events: Events, response: web.StreamResponse, deadline: float
) -> ApiError | None:
    try:
        async with asyncio.timeout_at(deadline):
            with opened.worker.asked():
                await unless_lost(opened.worker, _copy(opened, events, response))
    except TimeoutError:
        return ApiError(504, "deadline", "the answer was not complete at its deadline")
    except WorkerBroke as broke:
        return ApiError(502, "worker_failed", str(broke))
    return None


async def _copy(opened: Opened, events: Events, response: web.StreamResponse) -> None:
    async for data in Upstream.rest(opened):
        whole = events.take(data)
        if whole:
            await response.write(whole)
