"""A listening HTTP application with limits on its connections. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvferry.http.connections import CLOSING_TURNS, Connection, Connections, Handler, RejectReason
from kvferry.http.limits import BACKLOG
from kvferry.telemetry.logs.context import (
    REQUEST_HEADER,
    TRACE_HEADER,
    about,
    checked_trace,
    named,
    request_id,
)

log = logging.getLogger("kvferry.http")


class HttpSite:
    """Serves an application from ``start`` to ``stop``."""

    def __init__(
        self, app: web.Application, connections: Connections, *, shutdown_s: float
    ) -> None:
        app.middlewares.insert(0, connections.watch)
        app.middlewares.insert(0, _with_request_id)
        app.on_response_prepare.append(_add_ids)
        self._connections = connections
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            # Cancel the handler of a client that closes its connection.
            handler_cancellation=True,
            shutdown_timeout=shutdown_s,
            keepalive_timeout=connections.limits.keepalive_s,
            logger=ServerLog(connections),
        )
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from a bound socket."""
        await self._runner.setup()
        make = self._runner.server
        assert make is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(make(), self._connections), sock=listener, backlog=BACKLOG
        )

    async def stop(self) -> None:
        """Stop accepting, give handlers time to finish, close all connections. Idempotent."""
        if self._server is not None:
            await self._stop_accepting(self._server)
            self._server.close()
        await self._runner.cleanup()
        await self._connections.close()

    async def _stop_accepting(self, server: asyncio.Server) -> None:
        """Let asyncio finish the connections that it has accepted, and accept no more.

        asyncio sets them up in its next iterations. Since Python 3.12 that fails if the server is
        closed by then, and leaves their sockets open until they are garbage-collected.
        """
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)


@web.middleware
async def _with_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a request its client's id or a new one, for the log and the response."""
    headers = request.headers
    trace = checked_trace(headers.get(TRACE_HEADER))
    with about(request_id(headers.get(REQUEST_HEADER)), trace):
        response = await handler(request)
        if not response.prepared:
            # It is prepared after this block, without the context.
            await _add_ids(request, response)
        return response


async def _add_ids(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(named())


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. A malformed request becomes one short line; the rest passes unchanged."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(log, {})
        self._connections = connections

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Return the message unchanged."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Count malformed requests, and log them without the traceback of aiohttp's parser."""
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            self._connections.count(RejectReason.GARBAGE)
            log.info("bad-request client=%s reason=%.200r", *args[:1], error.message)
            return
        super().log(level, msg, *args, **kwargs)
