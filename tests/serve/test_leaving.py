"""Whoever leaves in the middle of a request is a line in the log, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from serve.clusters import wait_until
from serve.router_fakes import site

from kvferry.rendezvous.server import RendezvousServer

HEAD = b"%s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
NOW = struct.pack("ii", 1, 0)


def leave(url: str, what: bytes, *, reset: bool) -> None:
    """Begin a request, and hang up in the middle of its body."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as sock:
        sock.sendall(HEAD % what)
        # Its headers must have been read before it breaks.
        time.sleep(0.2)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)


def demand_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [m for m in caplog.messages if m.startswith("client-left")]


@pytest.mark.parametrize("reset", [True, False])
def test_at_the_rendezvous(caplog: pytest.LogCaptureFixture, reset: bool) -> None:
    caplog.set_level(logging.INFO)
    with RendezvousServer() as server:
        leave(server.url, b"PUT /v1/instances/a/ranks/0", reset=reset)
        wait_until(lines(caplog), "it to be noticed")
    (line,) = lines(caplog)()
    assert line.startswith("client-left method=PUT path=/v1/instances/a/ranks/0 ")
    demand_no_traceback(caplog)


@pytest.mark.parametrize("reset", [True, False])
def test_at_the_router(caplog: pytest.LogCaptureFixture, reset: bool) -> None:
    """The handler is cancelled, which the figures show."""

    async def talk() -> None:
        async with asyncio.timeout(30), site() as here:
            await asyncio.to_thread(leave, here.url, b"POST /v1/completions", reset=reset)
            while True:
                async with here.http.get(f"{here.url}/metrics") as response:
                    if 'status="499"' in await response.text():
                        return
                await asyncio.sleep(0.02)

    asyncio.run(talk())
    demand_no_traceback(caplog)
