"""The connections of one server: counted, bounded, and closed where no request comes of them.

aiohttp closes a connection on which nothing happens between two requests, and no
other. So each of its protocols is wrapped in ours, which knows when a request's
headers are awaited: from the connection's beginning or the request's first byte
until a handler takes it. A server that is full closes the connection that has
been without a request for longest, so half a request can't keep a whole one out;
if all have one, the newcomer is refused. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from http import HTTPStatus

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvferry.http.limits import HttpLimits

log = logging.getLogger("kvferry.http")

# From accepting a connection to having closed it: a loop that ends sooner leaves it open.
CLOSING_TURNS = 8

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Why(StrEnum):
    """What connections and requests are turned away for."""

    FULL = "full"
    DISPLACED = "displaced"
    LATE = "late"
    GARBAGE = "garbage"


class Connections:
    """All of one server's, and what was turned away."""

    def __init__(self, limits: HttpLimits, registry: CollectorRegistry | None = None) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        # Those without a request, the longest first.
        self._unused: dict[Connection, None] = {}
        self._closing = False
        self._refused = Counter(
            "kvferry_http_rejected",
            "Connections that were closed and requests that were not read, by reason",
            ["reason"],
            registry=registry,
        )
        for why in Why:
            self._refused.labels(why)
        gauge = Gauge("kvferry_http_connections", "Open connections of clients", registry=registry)
        gauge.set_function(lambda: len(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def count(self, why: Why) -> None:
        """Something was turned away."""
        self._refused.labels(why).inc()

    def admit(self, new: Connection) -> bool:
        """Take a connection in, if need be in place of one that is of no use."""
        if self._closing:
            return False
        if len(self._open) >= self.limits.connections and not self._displace():
            self.count(Why.FULL)
            log.warning("connections-full most=%d", self.limits.connections)
            return False
        self._open.add(new)
        self.unused(new)
        return True

    def _displace(self) -> bool:
        oldest = next((one for one in self._unused if not one.is_writing), None)
        if oldest is None:
            return False
        self.count(Why.DISPLACED)
        log.warning("connections-displaced most=%d", self.limits.connections)
        self.gone(oldest)
        oldest.abort()
        return True

    def used(self, connection: Connection) -> None:
        """It has a request."""
        self._unused.pop(connection, None)

    def unused(self, connection: Connection) -> None:
        """It has none, since now."""
        if connection in self._open:
            self._unused[connection] = None

    def gone(self, connection: Connection) -> None:
        """It is closed, or about to be."""
        self._open.discard(connection)
        self._unused.pop(connection, None)

    async def close(self) -> None:
        """Close all, also those that are being accepted at this moment."""
        self._closing = True
        for _ in range(CLOSING_TURNS):
            for one in list(self._open):
                one.abort()
            await asyncio.sleep(0)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: its headers are there, and nobody waits for them."""
        protocol = request.transport.get_protocol() if request.transport is not None else None
        if not isinstance(protocol, Connection):
            return await handler(request)
        protocol.began()
        try:
            return await handler(request)
        finally:
            protocol.ended()


class Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's own protocol and keeps the time."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_used = False
        self._is_refused = False
        self._has_bytes = False

    # ------------------------------------------------------------ for the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it in, or refuse it at once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._connections.admit(self):
            self._is_refused = True
            self._close(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; try again later")
            return
        self._inner.connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request. Its first set the clock."""
        if self._is_refused:
            return
        self._has_bytes = True
        if self._timer is None and not self._is_used:
            self._await_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return None if self._is_refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        if not self._is_refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        if not self._is_refused:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._stop_waiting()
        self._connections.gone(self)
        if not self._is_refused:
            self._inner.connection_lost(exc)

    # ------------------------------------------------------------ for the server

    @property
    def is_writing(self) -> bool:
        """Whether an answer is still on its way."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def began(self) -> None:
        """A request's headers are complete."""
        self._is_used = True
        self._stop_waiting()
        self._connections.used(self)

    def ended(self) -> None:
        """The request has its answer. What has come of the next one is not known."""
        self._is_used = False
        self._has_bytes = False
        self._connections.unused(self)

    def abort(self) -> None:
        """Close it without a word."""
        if self._transport is not None:
            self._transport.abort()

    def _await_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._connections.limits.header_s, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._connections.count(Why.LATE)
        log.info("headers-late seconds=%g", self._connections.limits.header_s)
        if self._has_bytes:
            self._close(HTTPStatus.REQUEST_TIMEOUT, "the request's headers did not come in time")
        else:
            self.abort()

    def _close(self, status: HTTPStatus, message: str) -> None:
        """Say why, if the way is free, and close."""
        assert self._transport is not None
        if self.is_writing:
            self._transport.abort()
            return
        self._transport.write(short_answer(status, message))
        self._transport.close()


def short_answer(status: HTTPStatus, message: str) -> bytes:
    """A whole HTTP answer in the form of our errors, for what no handler has seen."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = status.phrase.lower().replace(" ", "_")
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
