"""Relay of an event stream. It sends whole events, so that an error event can follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from aiohttp import web

from kvferry.http.api_errors import ApiError
from kvferry.http.sse import EventReader, ServerEvent
from kvferry.router.upstream import (
    MAX_RESPONSE_BYTES,
    FailedAttempt,
    FaultDomain,
    OpenResponse,
    Upstream,
    WorkerBroke,
    client_error,
    run_unless_lost,
    translate_errors,
)
from kvferry.router.worker_pool import Worker

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


class StreamPart:
    """One worker's part of a client's stream. It is left between two events if ``leaves()``."""

    def __init__(
        self,
        opened: OpenResponse,
        rewrite: Callable[[ServerEvent], bytes] = as_received,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        self.opened = opened
        self._events = WholeEvents(rewrite)
        self._leaves = leaves

    @property
    def worker(self) -> Worker:
        """The worker that sends it."""
        return self.opened.worker

    @property
    def ended(self) -> bool:
        """Whether it ended as it should, or with the worker's own error."""
        return self._events.ended

    @property
    def num_events(self) -> int:
        """Number of its events so far."""
        return self._events.num_events

    async def copy(self, response: web.StreamResponse) -> FailedAttempt | None:
        """Copy events to the client until they end, break, or the part is left.

        A part that was left can be copied on.
        """
        problem, left = f"the {self.worker} ended its response early", False
        try:
            with self.worker.count_request():
                left = await run_unless_lost(self.worker, self._copy(response))
        except WorkerBroke as broke:
            problem = str(broke)
        if left or self.ended:
            return None
        return FailedAttempt(self.worker, FaultDomain.LOST, problem)

    async def _copy(self, response: web.StreamResponse) -> bool:
        async for data in Upstream.rest(self.opened):
            with translate_errors(self.worker):
                whole = self._events.take(data)
            if whole:
                await response.write(whole)
            if self._leaves():
                # All that was read is sent, or waits in ``_events`` for the rest of its event.
                self.opened = self.opened._replace(head=b"")
                return True
        return False


# Returns with which part a stream goes on after a part was left, has failed, or has ended; None at
# the stream's end. Raises ``ApiError`` if nothing is left.
Following = Callable[[StreamPart, FailedAttempt | None], Awaitable[StreamPart | None]]


async def nowhere(part: StreamPart, failure: FailedAttempt | None) -> None:
    """End a stream with its first part."""
    if failure is not None:
        raise client_error(failure)


class Relayed(NamedTuple):
    """The worker that sent the last part of a stream, and the number of the stream's events."""

    worker: Worker
    num_events: int


async def relay(
    response: web.StreamResponse, first: StreamPart, deadline: float, following: Following = nowhere
) -> Relayed:
    """Relay a stream, part after part; if it breaks, end the client's with an error event."""
    # One of them may be copied several times.
    parts = [first]
    part: StreamPart | None = first
    try:
        async with asyncio.timeout_at(deadline):
            while part is not None:
                failure = await part.copy(response)
                part = await following(part, failure)
                if part is not None and part is not parts[-1]:
                    parts.append(part)
    except ApiError as error:
        await response.write(error.event())
    except TimeoutError:
        if not parts[-1].ended:
            message = "the response was not complete at its deadline"
            await response.write(ApiError(504, message, code="deadline").event())
    await response.write_eof()
    return Relayed(parts[-1].worker, sum(one.num_events for one in parts))


async def end_with(response: web.StreamResponse, error: ApiError) -> None:
    """End the client's stream with an error event."""
    await response.write(error.event())
    await response.write_eof()
