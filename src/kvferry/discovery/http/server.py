"""Runs the discovery service in a thread, inside whichever process starts it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

from kvferry.discovery.http.service import DiscoveryService
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.http.connections import Connections
from kvferry.http.limits import limits_here
from kvferry.http.listening import bind_socket, http_url
from kvferry.http.site import HttpSite
from kvferry.security.keys import ClusterKey, checked_bind_address

log = logging.getLogger("kvferry.discovery")

# Ranks renew every few seconds and wait at most five after an error.
SETTLE_S = 30.0
SHUTDOWN_S = 1.0
JOIN_S = 10.0
# Open files per connection: a request needs none beside the socket.
FILES_EACH = 1


class DiscoveryServer:
    """A discovery service that listens from ``start`` to ``stop``.

    A prefill instance may embed one, or ``kvferry serve discovery`` runs it alone.
    Without a key it listens on loopback only.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        key: ClusterKey | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.url = ""
        self._address = checked_bind_address(host, port, key)
        self._port = port
        self._signing_key = key.http if key is not None else None
        self._settle_s = settle_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> DiscoveryServer:
        """Listen. On return the server accepts connections and ``url`` is set."""
        listener = bind_socket(self._address, self._port)
        self.url = http_url(self._address, listener)
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(listener, ready),
            name="kvferry-discovery-server",
            daemon=True,
        )
        self._thread.start()
        if not ready.wait(JOIN_S):
            raise DiscoveryError(
                DiscoveryFault.INTERNAL, "the discovery service did not start; see the log"
            )
        log.info("listening url=%s", self.url)
        return self

    def stop(self) -> None:
        """Answer waiting clients, close every connection, end the thread. Idempotent."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_S)
        self._thread = None
        log.info("stopped url=%s", self.url)

    def __enter__(self) -> DiscoveryServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        # The embedding process may have set another loop policy, such as uvloop's.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve(listener, ready))

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        service = DiscoveryService(self._signing_key, self._settle_s)
        connections = Connections(limits_here(FILES_EACH), service.metrics.collection)
        site = HttpSite(service.application(), connections, shutdown_s=SHUTDOWN_S)
        await site.start(listener)
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stop.wait()
        service.stop_waiting()
        await site.stop()
