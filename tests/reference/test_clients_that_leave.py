"""Whoever leaves in the middle of a request is a line in the log, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from reference.clusters import wait_until
from router.fakes import site

from kvferry.discovery.http.server import DiscoveryServer

HEAD = b"%s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
NOW = struct.pack("ii", 1, 0)


def leave(url: str, what: bytes, *, reset: bool, body: bytes = b"{") -> None:
    """Begin a request, and hang up in the middle of its body, or of the answer."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as sock:
        sock.sendall(HEAD % what + body)
        # Its headers must have been read before it breaks.
        time.sleep(0.2)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)


def read_metrics(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8")


def demand_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [m for m in caplog.messages if m.startswith("client-left")]


@pytest.mark.parametrize("reset", [True, False])
def test_a_client_leaves_the_discovery_service(
    caplog: pytest.LogCaptureFixture, reset: bool
) -> None:
    caplog.set_level(logging.INFO)
    with DiscoveryServer() as server:
        leave(server.url, b"PUT /v1/instances/a/ranks/0", reset=reset)
        wait_until(lines(caplog), "it to be noticed")
    (line,) = lines(caplog)()
    assert line.startswith("client-left method=PUT path=/v1/instances/a/ranks/0 ")
    demand_no_traceback(caplog)


@pytest.mark.parametrize("reset", [True, False])
def test_a_client_leaves_a_long_poll(caplog: pytest.LogCaptureFixture, reset: bool) -> None:
    """There is nothing left to read from it, so its handler is cancelled, which counts too."""
    caplog.set_level(logging.INFO)
    with DiscoveryServer() as server:
        leave(server.url, b"GET /v1/instances/a?wait_s=60", reset=reset, body=b"{" * 100)
        wait_until(lines(caplog), "it to be noticed")
        counted = read_metrics(server.url)
    (line,) = lines(caplog)()
    assert line.startswith("client-left method=GET path=/v1/instances/a ")
    assert 'route="GET /v1/instances/{name}",status="499"} 1.0' in counted
    demand_no_traceback(caplog)


@pytest.mark.parametrize("reset", [True, False])
def test_a_client_leaves_the_router(caplog: pytest.LogCaptureFixture, reset: bool) -> None:
    """The handler is cancelled, which the figures show."""

    async def talk() -> str:
        async with asyncio.timeout(30), site() as here:
            await asyncio.to_thread(leave, here.url, b"POST /v1/completions", reset=reset)
            text = ""
            while 'status="499"' not in text:
                async with here.http.get(f"{here.url}/metrics") as response:
                    text = await response.text()
            return text

    assert 'path="/v1/completions",status="499"' in asyncio.run(talk())
    demand_no_traceback(caplog)
