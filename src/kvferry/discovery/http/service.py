"""The discovery service's HTTP handlers around the registry, and its clock.

Everything here runs in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvferry.discovery.http.cluster_status import InstanceStatusBoard
from kvferry.discovery.http.gate import (
    RANK_PATH,
    RequestGate,
    decoded,
    demand_same,
    incarnation_in,
    json_response,
    metrics_response,
    rank_in,
)
from kvferry.discovery.http.messages import LongerLease, Registration, Renewal
from kvferry.discovery.http.metrics import DiscoveryMetrics
from kvferry.discovery.http.views import ViewRoutes
from kvferry.discovery.http.waiters import Waiters
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView, Summaries
from kvferry.discovery.registry import InstanceRegistry

log = logging.getLogger("kvferry.discovery")

MAX_WAIT_S = 60.0
TICK_S = 0.2
# A tick that is so late means that the process was stopped, so ranks could not renew.
STALL_S = 1.0
DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?", re.ASCII)


class DiscoveryService:
    """One discovery service: its registry, and the handlers of its requests.

    After a start the registry is empty although ranks may be running. Until ``settle_s`` have
    passed, the service does not tell clients with a view from before that their instance ended.
    """

    def __init__(self, signing_key: bytes | None, settle_s: float) -> None:
        self.registry = InstanceRegistry(secrets.token_hex(4))
        self._waiters = Waiters()
        self.metrics = DiscoveryMetrics(self.registry, self._waiters)
        self._gate = RequestGate(signing_key, self.metrics.requests)
        self._settled_at = time.monotonic() + settle_s
        self._status = InstanceStatusBoard("discovery")
        # Made once for each change, because every router asks for it each second.
        self._listed = Summaries(())
        self._list_body = b""

    def application(self) -> web.Application:
        """Return the routes. While the application runs, leases expire."""
        app = self._gate.application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/v1/instances", self._get_list),
                web.get("/v1/instances/{name}", self._get_instance),
                web.put(RANK_PATH, self._put_rank),
                web.put(f"{RANK_PATH}/lease", self._put_lease),
                web.delete(RANK_PATH, self._delete_rank),
                *ViewRoutes(self._status).routes(),
            ]
        )
        app.cleanup_ctx.append(self._clock)
        return app

    @property
    def collection(self) -> CollectorRegistry:
        """Where the metrics are."""
        return self.metrics.collection

    async def end(self) -> None:
        """Answer every waiting request; later ones do not wait."""
        self._waiters.close()

    # ------------------------------------------------------------ time

    async def _clock(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._tick())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - due > STALL_S:
                log.warning("stalled seconds=%.1f", now - due)
                self.registry.extend_all(now - due)
            self._status.forget(now)
            for name, rank in self.registry.expire(now):
                log.info("lease-expired instance=%s rank=%d", name, rank)
                self.metrics.expired.inc()
                self._waiters.wake(name)

    # ------------------------------------------------------------ requests of ranks

    async def _put_rank(self, request: web.Request) -> web.Response:
        body = decoded(await request.read(), Registration)
        record, name, rank = body.record, *rank_in(request)
        demand_same(str(record.peer), f"{name}/{rank}")
        lease_s = self.registry.granted_s(body.lease_s)
        if self.registry.register(record, time.monotonic(), lease_s):
            self._waiters.wake(name)
        log.info("registered instance=%s rank=%d incarnation=%x", name, rank, record.incarnation)
        return web.Response(status=204)

    async def _put_lease(self, request: web.Request) -> web.Response:
        body = decoded(await request.read(), Renewal)
        name, rank = rank_in(request)
        lease_s = self.registry.granted_s(body.lease_s)
        self.registry.renew(name, rank, body.incarnation, time.monotonic(), lease_s)
        if lease_s > body.lease_s:
            return json_response(LongerLease(lease_s))
        return web.Response(status=204)

    async def _delete_rank(self, request: web.Request) -> web.Response:
        name, rank = rank_in(request)
        incarnation = incarnation_in(request)
        if self.registry.withdraw(name, rank, incarnation):
            self._waiters.wake(name)
        log.info("left instance=%s rank=%d incarnation=%x", name, rank, incarnation)
        return web.Response(status=204)

    # ------------------------------------------------------------ requests of others

    async def _get_instance(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        version = request.query.get("version", "")
        deadline = time.monotonic() + _wait_s(request.query.get("wait_s", "0"))
        while True:
            view = self.registry.resolve(name)
            if view is not None and view.version != version:
                return json_response(view)
            has_ended = view is None and version and not self._is_unsettled(version)
            now = time.monotonic()
            if has_ended or now >= deadline:
                break
            until = min(deadline, self._settled_at) if self._is_unsettled(version) else deadline
            await self._waiters.wait(name, until - now)
        return self._unchanged(name, version, view)

    def _is_unsettled(self, version: str) -> bool:
        """Return whether the version is from before the start, and ranks may still register."""
        is_foreign = version != "" and not version.startswith(f"{self.registry.epoch}.")
        return is_foreign and time.monotonic() < self._settled_at

    def _unchanged(self, name: str, version: str, view: InstanceView | None) -> web.Response:
        if view is not None:
            return web.Response(status=304)
        if self._is_unsettled(version):
            raise DiscoveryError(
                DiscoveryFault.SETTLING,
                "the discovery service has just started; ask again in a moment",
            )
        raise DiscoveryError(DiscoveryFault.INCOMPLETE, self.registry.explain(name))

    async def _get_list(self, request: web.Request) -> web.Response:
        if self._listed.version != (version := f"{self.registry.epoch}.{self.registry.revision}"):
            self._listed = Summaries(self.registry.summaries(), version)
            self._list_body = msgspec.json.encode(self._listed)
        if request.query.get("version") == version:
            return web.Response(status=304)
        return web.Response(body=self._list_body, content_type="application/json")

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return metrics_response(self.metrics.text())


def _wait_s(text: str) -> float:
    if not DECIMAL.fullmatch(text) or float(text) > MAX_WAIT_S:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"wait_s must be from 0 to {MAX_WAIT_S:g} seconds, not {text!r:.40}",
        )
    return float(text)
