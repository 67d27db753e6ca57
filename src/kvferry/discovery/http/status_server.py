"""The status service: the page of a cluster whose discovery service has none, such as etcd.

Endpoints send it their reports as they do to the built-in discovery service. It registers under a
fixed name (``status_page.py``), keeps nothing on disk, and may be restarted or moved at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from kvferry.discovery.client import LEASE_S, DiscoveryClient
from kvferry.discovery.http.cluster_status import InstanceStatusBoard
from kvferry.discovery.http.gate import RequestGate, metrics_response
from kvferry.discovery.http.server import ServiceThread
from kvferry.discovery.http.views import ViewRoutes
from kvferry.discovery.status_page import STATUS_NAME, web_record
from kvferry.errors import InputError
from kvferry.ids import MAX_ID
from kvferry.security.keys import ClusterKey, resolve_ip

TICK_S = 1.0


class StatusService:
    """The handlers of one status service. Belongs to one event loop."""

    def __init__(self, signing_key: bytes | None) -> None:
        self.collection = CollectorRegistry()
        self._board = InstanceStatusBoard("status")
        requests = Counter(
            "kvferry_discovery_requests",
            "Requests by route and response status",
            ["route", "status"],
            registry=self.collection,
        )
        self._gate = RequestGate(signing_key, requests)

    def application(self) -> web.Application:
        """Return the routes."""
        app = self._gate.application()
        app.add_routes([web.get("/metrics", self._get_metrics), *ViewRoutes(self._board).routes()])
        app.cleanup_ctx.append(self._forgetting)
        return app

    async def end(self) -> None:
        """Do nothing: no request waits for an event."""

    async def _forgetting(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._forget())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._board.forget(time.monotonic())

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return metrics_response(generate_latest(self.collection))


class StatusServer(ServiceThread):
    """A status service, registered while it runs. ``advertise``: its address for others."""

    thread_name = "kvferry-status-server"

    def __init__(
        self,
        discovery: str,
        host: str = "127.0.0.1",
        port: int = 0,
        key: ClusterKey | None = None,
        advertise: str = "",
    ) -> None:
        super().__init__(host, port, key)
        self._reached_at = resolve_ip(advertise or host)
        if ipaddress.ip_address(self._reached_at).is_unspecified:
            raise InputError(
                f"others cannot reach {host}; give an address that they can, with --advertise"
            )
        self._client = DiscoveryClient(discovery, key)
        if self._client.discovery.status_url:
            self._client.close()
            raise InputError(f"{discovery} has a page of its own; use it, or give an etcd:// URL")

    def _make_service(self) -> StatusService:
        return StatusService(self._signing_key)

    def start(self) -> StatusServer:
        """Listen and register."""
        super().start()
        host = f"[{self._reached_at}]" if ":" in self._reached_at else self._reached_at
        self.url = f"http://{host}:{urlsplit(self.url).port}"
        record = web_record(STATUS_NAME, self.url, secrets.randbelow(MAX_ID))
        self._client.register(record, LEASE_S)
        return self

    def stop(self) -> None:
        """Deregister, and stop listening."""
        self._client.close()
        super().stop()
