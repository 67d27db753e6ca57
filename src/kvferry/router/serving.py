"""Start of a router: inside a running event loop, or as a whole process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable

from kvferry import checked_bind_address
from kvferry.http.connections import Connections
from kvferry.http.limits import limits_here
from kvferry.http.listening import bind_socket, http_url, load_cluster_key
from kvferry.http.site import HttpSite
from kvferry.router.app import Router
from kvferry.router.options import RouterOptions

log = logging.getLogger("kvferry.router")

SHUTDOWN_S = 1.0
# Per request: the client and two workers.
FILES_PER_REQUEST = 3


@contextlib.asynccontextmanager
async def serving(options: RouterOptions) -> AsyncIterator[str]:
    """Serve while the block runs; yield the URL."""
    key = load_cluster_key(options.key)
    address = checked_bind_address(options.host, options.port, key)
    listener = bind_socket(address, options.port)
    url = http_url(address, listener)
    router = Router(options, key)
    connections = Connections(limits_here(FILES_PER_REQUEST), router.metrics.registry)
    site = HttpSite(router.application(), connections, shutdown_s=SHUTDOWN_S)
    await site.start(listener)
    log.info("listening url=%s", url)
    try:
        yield url
    finally:
        await site.stop()
        log.info("stopped url=%s", url)


def run_router(options: RouterOptions, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM; call ``ready`` with the URL."""
    asyncio.run(_serve_until_signal(options, ready))


async def _serve_until_signal(options: RouterOptions, ready: Callable[[str], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serving(options) as url:
        ready(url)
        await stop.wait()
