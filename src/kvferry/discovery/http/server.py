"""Runs the discovery service in a thread, inside whichever process starts it."""

from __future__ import annotations

import logging
import socket

from kvferry.discovery.http.service import DiscoveryService
from kvferry.discovery.loop_thread import LoopThread
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.http.connections import Connections
from kvferry.http.limits import limits_here
from kvferry.http.listening import bind_socket, http_url
from kvferry.http.site import HttpSite
from kvferry.security.keys import ClusterKey, checked_bind_address

log = logging.getLogger("kvferry.discovery")

# Ranks renew every few seconds and wait at most five after an error.
SETTLE_S = 30.0
START_S = 10.0
SHUTDOWN_S = 1.0
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
        self._thread: LoopThread | None = None
        self._service: DiscoveryService | None = None
        self._site: HttpSite | None = None

    def start(self) -> DiscoveryServer:
        """Listen. On return the server accepts connections and ``url`` is set."""
        listener = bind_socket(self._address, self._port)
        self.url = http_url(self._address, listener)
        self._thread = LoopThread("kvferry-discovery-server", self._finish)
        try:
            self._thread.run(self._begin(listener), START_S)
        except TimeoutError:
            raise DiscoveryError(
                DiscoveryFault.INTERNAL, "the discovery service did not start; see the log"
            ) from None
        log.info("listening url=%s", self.url)
        return self

    def stop(self) -> None:
        """Answer waiting clients, close every connection, end the thread. Idempotent."""
        if self._thread is None:
            return
        self._thread.close()
        self._thread = None
        log.info("stopped url=%s", self.url)

    def __enter__(self) -> DiscoveryServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    async def _begin(self, listener: socket.socket) -> None:
        self._service = DiscoveryService(self._signing_key, self._settle_s)
        connections = Connections(limits_here(FILES_EACH), self._service.metrics.collection)
        self._site = HttpSite(self._service.application(), connections, shutdown_s=SHUTDOWN_S)
        await self._site.start(listener)

    async def _finish(self) -> None:
        if self._service is not None and self._site is not None:
            self._service.stop_waiting()
            await self._site.stop()
