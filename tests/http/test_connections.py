"""Clients that hold connections and send nothing, half a request, or garbage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from limited import ENOUGH_S, bounded
from prometheus_client import CollectorRegistry

from kvferry.http.connections import Connections, RejectReason
from kvferry.http.limits import HttpLimits
from kvferry.http.site import HttpSite

LONG_S = 600.0
# Short enough to be waited for, and nothing else happens meanwhile.
SHORT_S = 0.05
WHOLE = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


class Client:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> bytes:
        """Read one response, head and body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        return head + await self._reader.readexactly(int(length.split(b":")[1]))

    async def rest(self) -> bytes:
        """Read until the server closes."""
        try:
            return await self._reader.read()
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self._writer.close()


class Served:
    """A server and its counts. ``/slow`` answers once ``go`` is set."""

    def __init__(self, limits: HttpLimits) -> None:
        self.registry = CollectorRegistry()
        self.connections = Connections(limits, self.registry)
        self.go, self.began = asyncio.Event(), asyncio.Event()
        self.clients: list[Client] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        app = web.Application()
        app.add_routes([web.get("/", self._quick), web.get("/slow", self._slow)])
        self.site = HttpSite(app, self.connections, shutdown_s=0.1)

    async def _quick(self, request: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def _slow(self, request: web.Request) -> web.Response:
        self.began.set()
        await self.go.wait()
        return web.Response(text="slow")

    async def start(self) -> None:
        await self.site.start(self._listener)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    async def client(self, data: bytes = b"") -> Client:
        address = self.address
        client = Client(*await asyncio.open_connection(*address))
        self.clients.append(client)
        await client.send(data)
        return client

    def refused(self, why: RejectReason) -> int:
        return int(
            self.registry.get_sample_value("kvferry_http_rejected_total", {"reason": why}) or 0
        )


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Served]:
    here = Served(HttpLimits(**({"header_s": LONG_S, "keepalive_s": LONG_S} | limits)))
    await here.start()
    try:
        yield here
    finally:
        for client in here.clients:
            client.close()
        await here.site.stop()


@bounded
async def test_half_a_request_is_closed_in_time() -> None:
    async with served(header_s=SHORT_S) as here:
        for client in (await here.client(b"GET /he"), await here.client()):
            await client.rest()
        assert here.refused(RejectReason.LATE) == 2
        assert len(here.connections) == 0


@bounded
async def test_half_of_a_second_request_is_closed_in_time() -> None:
    async with served() as here:
        client = await here.client(WHOLE)
        assert (await client.answer()).endswith(b"quick")
        here.connections.limits = HttpLimits(header_s=SHORT_S)
        await client.send(b"GET /he")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


@bounded
async def test_a_slow_handler_is_not_late() -> None:
    async with served(header_s=1.0) as here:
        slow = await here.client(WHOLE.replace(b" / ", b" /slow "))
        await here.began.wait()
        # By the time another connection is closed for being late, this one had longer.
        assert await (await here.client()).rest() == b""
        here.go.set()
        assert (await slow.answer()).endswith(b"slow")


@bounded
async def test_an_idle_connection_is_closed_in_time() -> None:
    async with served(keepalive_s=SHORT_S) as here:
        await (await here.client(WHOLE)).rest()
        assert here.refused(RejectReason.LATE) == 0


@bounded
async def test_half_requests_are_displaced_by_whole_ones() -> None:
    async with served(connections=4) as here:
        halves = [await here.client(b"GET /he") for _ in range(10)]
        assert (await (await here.client(WHOLE)).answer()).endswith(b"quick")
        for half in halves[:6]:
            assert await half.rest() == b""
        assert len(here.connections) == 4
        assert here.refused(RejectReason.DISPLACED) == 7


@bounded
async def test_a_full_server_answers_503() -> None:
    async with served(connections=2) as here:
        slow = WHOLE.replace(b" / ", b" /slow ")
        busy = [await here.client(slow)]
        await here.began.wait()
        here.began.clear()
        busy.append(await here.client(slow))
        await here.began.wait()
        answer = await (await here.client()).rest()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too many connections" in answer
        assert here.refused(RejectReason.FULL) == 1
        here.go.set()
        for client in busy:
            assert (await client.answer()).endswith(b"slow")


@bounded
async def test_connections_during_shutdown_are_closed() -> None:
    async with served() as here:
        # In the kernel's hands; the loop's next turn accepts them, and those after it take them in.
        knocking = [socket.create_connection(here.address) for _ in range(20)]
        await asyncio.sleep(0)
        await here.site.stop()
        # A connection that is still open now would stay open.
        assert len(here.connections) == 0
    for one in knocking:
        one.settimeout(ENOUGH_S)
        with one, contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""


@bounded
async def test_the_count_returns_to_zero() -> None:
    async with served(connections=8) as here:
        for _ in range(20):
            client = await here.client(WHOLE)
            await client.answer()
            client.close()
        while len(here.connections):
            await asyncio.sleep(0.01)
        gauge = here.registry.get_sample_value("kvferry_http_connections")
        assert gauge == 0
        assert here.refused(RejectReason.FULL) == here.refused(RejectReason.DISPLACED) == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET / HTTQ/9\r\n\r\n",
    ],
)
@pytest.mark.parametrize("first", [b"", WHOLE])
@bounded
async def test_garbage_is_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, first: bytes, garbage: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as here:
        client = await here.client(first)
        if first:
            await client.answer()
        await client.send(garbage)
        assert (await client.rest()).startswith(b"HTTP/1.0 400 ")
        assert here.refused(RejectReason.GARBAGE) == 1
    mine = [record for record in caplog.records if record.name != "asyncio"]
    assert [record.getMessage().split()[0] for record in mine] == ["bad-request"]
    assert mine[0].levelno == logging.INFO
    assert mine[0].exc_info is None


@bounded
async def test_a_bug_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as here:
        here.go = None  # type: ignore[assignment]
        client = await here.client(WHOLE.replace(b" / ", b" /slow "))
        assert b" 500 " in await client.rest()
    (record,) = [record for record in caplog.records if record.name == "kvferry.http"]
    assert record.exc_info is not None
    assert record.levelno == logging.ERROR
