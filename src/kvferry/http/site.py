"""An application that listens, with bounds around it. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvferry.http.connections import CLOSING_TURNS, Connection, Connections, Why
from kvferry.http.limits import BACKLOG
from kvferry.http.requests import identify

log = logging.getLogger("kvferry.http")


class HttpSite:
    """Listens from ``start`` to ``stop``."""

    def __init__(
        self, app: web.Application, connections: Connections, *, shutdown_s: float
    ) -> None:
        app.middlewares.insert(0, connections.watch)
        identify(app)
        self._connections = connections
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            # Whoever hangs up waits for nothing any more, and their handler learns of it.
            handler_cancellation=True,
            shutdown_timeout=shutdown_s,
            keepalive_timeout=connections.limits.keepalive_s,
            logger=ServerLog(connections),
        )
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Take connections from a socket that is bound."""
        await self._runner.setup()
        make = self._runner.server
        assert make is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(make(), self._connections), sock=listener, backlog=BACKLOG
        )

    async def stop(self) -> None:
        """Take no more connections, let handlers end in their time, close all. Idempotent."""
        if self._server is not None:
            await self._stop_accepting(self._server)
            self._server.close()
        await self._runner.cleanup()
        await self._connections.close()

    async def _stop_accepting(self, server: asyncio.Server) -> None:
        """Let those in who have been accepted, and nobody else.

        asyncio makes their connections in its next turns. If the server is closed by then it
        fails to, since Python 3.12, and leaves their sockets open until they are collected.
        """
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(CLOSING_TURNS):
            await asyncio.sleep(0)


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp says of requests: what is no HTTP is the client's mistake, and one short line.

    Anything else that it says is passed on as it is.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__(log, {})
        self._connections = connections

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Nothing is added."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Count garbage; a traceback of aiohttp's parser says nothing that its message does not."""
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            self._connections.count(Why.GARBAGE)
            log.info("bad-request client=%s reason=%.200r", *args[:1], error.message)
            return
        super().log(level, msg, *args, **kwargs)
