"""Limits on the connections of one server: their number, and the time for a request's headers.

aiohttp only closes connections that are idle between two requests. So each of its protocols is
wrapped in a ``Connection``, which also limits the time from the start of a connection, or from a
request's first byte, until a handler receives the request. A full server closes the connection
that has been without a request for longest, so incomplete requests cannot keep complete ones out.
If every connection has a request, the new connection is refused. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvferry.http.api_errors import JSON, ApiError
from kvferry.http.limits import HttpLimits

log = logging.getLogger("kvferry.http")

# Event loop iterations from accepting a connection to having closed it.
CLOSING_TURNS = 8

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RejectReason(StrEnum):
    """Why a connection was closed or a request not read."""

    FULL = "full"
    DISPLACED = "displaced"
    LATE = "late"
    GARBAGE = "garbage"


class Connections:
    """The open connections of one server, with counts of rejected ones."""

    def __init__(self, limits: HttpLimits, registry: CollectorRegistry | None = None) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        # Connections without a request, the longest idle first.
        self._idle: dict[Connection, None] = {}
        self._closing = False
        self._refused = Counter(
            "kvferry_http_rejected",
            "Rejected connections and requests, by reason",
            ["reason"],
            registry=registry,
        )
        for reason in RejectReason:
            self._refused.labels(reason)
        gauge = Gauge("kvferry_http_connections", "Open connections of clients", registry=registry)
        gauge.set_function(lambda: len(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def count(self, reason: RejectReason) -> None:
        """Count one rejected connection or request."""
        self._refused.labels(reason).inc()

    def admit(self, new: Connection) -> bool:
        """Accept a connection, in place of an idle one if need be; return whether it fits."""
        if self._closing:
            return False
        if len(self._open) >= self.limits.connections and not self._displace():
            self.count(RejectReason.FULL)
            log.warning("connections-full most=%d", self.limits.connections)
            return False
        self._open.add(new)
        self.mark_idle(new)
        return True

    def _displace(self) -> bool:
        oldest = next((one for one in self._idle if not one.is_writing), None)
        if oldest is None:
            return False
        self.count(RejectReason.DISPLACED)
        log.warning("connections-displaced most=%d", self.limits.connections)
        self.remove(oldest)
        oldest.abort()
        return True

    def mark_busy(self, connection: Connection) -> None:
        """Note that a connection has a request."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: Connection) -> None:
        """Note that a connection has no request from now on."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    async def close(self) -> None:
        """Close all connections, including those that are being accepted."""
        self._closing = True
        for _ in range(CLOSING_TURNS):
            for one in list(self._open):
                one.abort()
            await asyncio.sleep(0)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that marks a connection as busy during its request."""
        protocol = request.transport.get_protocol() if request.transport is not None else None
        if not isinstance(protocol, Connection):
            return await handler(request)
        protocol.begin_request()
        try:
            return await handler(request)
        finally:
            protocol.end_request()


class Connection(asyncio.Protocol):
    """One connection: forwards all events to aiohttp's protocol, and enforces ``header_s``."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False
        self._is_refused = False
        self._has_bytes = False

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it at once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._connections.admit(self):
            self._is_refused = True
            self._close(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; try again later")
            return
        self._inner.connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Forward bytes of a request. The first one starts the timer."""
        if self._is_refused:
            return
        self._has_bytes = True
        if self._timer is None and not self._is_busy:
            self._start_timer()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        return None if self._is_refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        """Forward that the write buffer is full."""
        if not self._is_refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward that the write buffer has drained."""
        if not self._is_refused:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward that the connection is closed."""
        self._stop_timer()
        self._connections.remove(self)
        if not self._is_refused:
            self._inner.connection_lost(exc)

    # ------------------------------------------------------------ called by Connections

    @property
    def is_writing(self) -> bool:
        """Whether a response is still being sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def begin_request(self) -> None:
        """Note that a request's headers are complete."""
        self._is_busy = True
        self._stop_timer()
        self._connections.mark_busy(self)

    def end_request(self) -> None:
        """Note that a request has its response. Bytes of the next one may have arrived."""
        self._is_busy = False
        self._has_bytes = False
        self._connections.mark_idle(self)

    def abort(self) -> None:
        """Close it without a response."""
        if self._transport is not None:
            self._transport.abort()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._connections.limits.header_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._connections.count(RejectReason.LATE)
        log.info("headers-late seconds=%g", self._connections.limits.header_s)
        if self._has_bytes:
            self._close(
                HTTPStatus.REQUEST_TIMEOUT,
                "the request's headers did not arrive in time; send it again",
            )
        else:
            self.abort()

    def _close(self, status: HTTPStatus, message: str) -> None:
        """Close it with an error response, unless another response is still being sent."""
        assert self._transport is not None
        if self.is_writing:
            self._transport.abort()
            return
        self._transport.write(_error_response(status, message))
        self._transport.close()


def _error_response(status: HTTPStatus, message: str) -> bytes:
    """Return a whole HTTP error response, for requests that reach no handler."""
    code = status.phrase.lower().replace(" ", "_")
    body = ApiError(status.value, message, code=code).document
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {JSON}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
