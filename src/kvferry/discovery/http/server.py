"""Runs the discovery service in a thread, inside whichever process starts it."""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from typing import Protocol, Self

from aiohttp import web
from prometheus_client import CollectorRegistry

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


class WebService(Protocol):
    """A service that a thread can serve."""

    @property
    def collection(self) -> CollectorRegistry:
        """Where the service's metrics are."""

    def application(self) -> web.Application:
        """Return the routes."""

    async def end(self) -> None:
        """Answer every waiting request and close connections."""


class ServiceThread(ABC):
    """A web service that listens from ``start`` to ``stop``. Without a key, on loopback only."""

    thread_name: str

    def __init__(self, host: str, port: int, key: ClusterKey | None) -> None:
        self.url = ""
        self._address = checked_bind_address(host, port, key)
        self._port = port
        self._signing_key = key.http if key is not None else None
        self._thread: LoopThread | None = None
        self._service: WebService | None = None
        self._site: HttpSite | None = None

    @abstractmethod
    def _make_service(self) -> WebService:
        """Make the service, on the thread that runs it."""

    def start(self) -> Self:
        """Listen. On return the server accepts connections and ``url`` is set."""
        listener = bind_socket(self._address, self._port)
        self.url = http_url(self._address, listener)
        self._thread = LoopThread(self.thread_name, self._finish)
        try:
            self._thread.run(self._begin(listener), START_S)
        except TimeoutError:
            raise DiscoveryError(
                DiscoveryFault.INTERNAL, f"{self.thread_name} did not start; see the log"
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

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    async def _begin(self, listener: socket.socket) -> None:
        self._service = self._make_service()
        connections = Connections(limits_here(FILES_EACH), self._service.collection)
        self._site = HttpSite(self._service.application(), connections, shutdown_s=SHUTDOWN_S)
        await self._site.start(listener)

    async def _finish(self) -> None:
        if self._service is not None and self._site is not None:
            await self._service.end()
            await self._site.stop()


class DiscoveryServer(ServiceThread):
    """A discovery service.

    A prefill instance may embed one, or ``kvferry serve discovery`` runs it alone.
    """

    thread_name = "kvferry-discovery-server"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        key: ClusterKey | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        super().__init__(host, port, key)
        self._settle_s = settle_s

    def _make_service(self) -> DiscoveryService:
        return DiscoveryService(self._signing_key, self._settle_s)
