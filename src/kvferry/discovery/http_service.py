"""The discovery service over HTTP: a thin shell around the registry, its clock and its waiters.

Everything here runs in one event loop. An answer is always JSON (but for the
metrics), an error is always ``{"error": {"code", "message"}}``, and nothing that
comes in can show a traceback to whoever sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from kvferry.dashboard.routes import PageRoutes, is_guarded, is_open
from kvferry.discovery.cluster_status import DiscoveryStatus
from kvferry.discovery.metrics import DiscoveryMetrics
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryErrorBody,
    DiscoveryErrorDocument,
    DiscoveryFault,
    InstanceView,
    Registration,
    Renewal,
    Summaries,
)
from kvferry.discovery.registry import InstanceRegistry
from kvferry.discovery.waiters import Waiters
from kvferry.errors import KvferryError
from kvferry.ids import MAX_ID
from kvferry.security.signing import SCHEME, Introduction, RequestVerifier, SignatureFault
from kvferry.security.tokens import token_problem
from kvferry.telemetry.status import EndpointStatus

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("kvferry.discovery")

MAX_BODY_BYTES = 1 << 20
BODY_S = 10.0
MAX_WAIT_S = 60.0
TICK_S = 0.2
# When the service did not run for so long, nobody could renew.
STALL_S = 1.0
WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?", re.ASCII)

STATUS = {
    DiscoveryFault.MALFORMED: 400,
    DiscoveryFault.UNSIGNED: 401,
    DiscoveryFault.REPLAYED: 401,
    DiscoveryFault.OTHER_LIFE: 401,
    DiscoveryFault.NOT_FOUND: 404,
    DiscoveryFault.INCOMPLETE: 404,
    DiscoveryFault.NO_LEASE: 404,
    DiscoveryFault.METHOD: 405,
    DiscoveryFault.SLOW: 408,
    DiscoveryFault.REPLACED: 409,
    DiscoveryFault.OVERSIZED: 413,
    DiscoveryFault.INTERNAL: 500,
    DiscoveryFault.FULL: 503,
    DiscoveryFault.SETTLING: 503,
    DiscoveryFault.STOPPING: 503,
}
# As other servers call it.
CLIENT_LEFT = 499
FAULTS = {
    SignatureFault.UNSIGNED: DiscoveryFault.UNSIGNED,
    SignatureFault.OTHER_KEY: DiscoveryFault.UNSIGNED,
    SignatureFault.CLOCK: DiscoveryFault.UNSIGNED,
    SignatureFault.OTHER_LIFE: DiscoveryFault.OTHER_LIFE,
    SignatureFault.REPLAYED: DiscoveryFault.REPLAYED,
    SignatureFault.FULL: DiscoveryFault.FULL,
}
# What a program without the key may ask: neither names anybody.
OPEN_PATHS = ("/healthz", "/metrics")


class DiscoveryService:
    """One discovery: its registry, and the handlers of its requests.

    After a start the service knows nobody, though many may be there. Until
    ``settle_s`` have passed it does not tell those who knew an instance that it
    has ended.
    """

    def __init__(self, signing_key: bytes | None, settle_s: float) -> None:
        self.registry = InstanceRegistry(secrets.token_hex(4))
        self._waiters = Waiters()
        self.metrics = DiscoveryMetrics(self.registry, self._waiters)
        self._guard = RequestVerifier(signing_key) if signing_key is not None else None
        self._settled_at = time.monotonic() + settle_s
        self._signing_key = signing_key
        self.lookout = DiscoveryStatus(self.registry)

    def application(self) -> web.Application:
        """The routes, and the expiry of leases for as long as the application runs."""
        app = web.Application(middlewares=[self._frame], client_max_size=MAX_BODY_BYTES)
        rank = "/v1/instances/{name}/ranks/{rank}"
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/instances", self._list),
                web.get("/v1/instances/{name}", self._instance),
                web.put(rank, self._register),
                web.put(f"{rank}/lease", self._renew),
                web.delete(rank, self._leave),
                web.put(f"{rank}/view", self._view),
                web.delete(f"{rank}/view", self._unview),
                *PageRoutes(self.lookout).routes(),
            ]
        )
        app.cleanup_ctx.append(self._expiry)
        return app

    def stop_waiting(self) -> None:
        """Answer everybody who waits; from now on nobody waits."""
        self._waiters.close()

    # ------------------------------------------------------------ around every request

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLIENT_LEFT
        try:
            response = await self._guarded(request, handler)
            status = response.status
            return response
        except asyncio.CancelledError as error:
            # aiohttp cancels the handler of a client that hangs up.
            log.info("client-left method=%s path=%s reason=%r", request.method, request.path, error)
            raise
        finally:
            route = request.match_info.route.resource
            asked = f"{request.method} {route.canonical}" if route is not None else "other"
            self.metrics.requests.labels(asked, str(status)).inc()

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            await self._admit(request)
            return await handler(request)
        except DiscoveryError as error:
            return _error(error.fault, str(error))
        except web.HTTPException as error:
            return _error(*_translated(error))
        except (ConnectionError, web.RequestPayloadError) as error:
            # The client has left in the middle, and nobody reads this.
            log.info("client-left method=%s path=%s reason=%r", request.method, request.path, error)
            return web.Response(status=CLIENT_LEFT)
        except Exception:
            log.exception("request-failed method=%s", request.method)
            return _error(DiscoveryFault.INTERNAL, "the discovery service has a bug; see its log")

    async def _admit(self, request: web.Request) -> None:
        """Read the body in bounded time and size, and let only signed requests pass."""
        header = request.headers.get("Authorization", "")
        if not header:
            # Nothing is read from whoever does not even try.
            self._demand_signed(request, header, b"")
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise DiscoveryError(DiscoveryFault.SLOW, "the body did not come in time") from None
        self._demand_signed(request, header, body)

    def _demand_signed(self, request: web.Request, header: str, body: bytes) -> None:
        if self._guard is None or request.path in OPEN_PATHS or is_open(request.path):
            return
        if is_guarded(request.path) and not header.startswith(f"{SCHEME} "):
            self._demand_token(header)
            return
        target, now = request.raw_path, time.time()
        complaint = self._guard.check(header, request.method, target, body, now)
        if complaint is not None:
            raise DiscoveryError(FAULTS[complaint.doubt], complaint.message)

    def _demand_token(self, header: str) -> None:
        assert self._signing_key is not None
        problem = token_problem(self._signing_key, header, time.time())
        if problem is not None:
            raise DiscoveryError(DiscoveryFault.UNSIGNED, problem)

    async def _expiry(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._expire())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _expire(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - due > STALL_S:
                log.warning("stalled seconds=%.1f", now - due)
                self.registry.prolong(now - due)
            self.lookout.forget(now)
            for name, rank in self.registry.expire(now):
                log.info("lease-expired instance=%s rank=%d", name, rank)
                self.metrics.expired.inc()
                self._waiters.wake(name)

    # ------------------------------------------------------------ requests of ranks

    async def _register(self, request: web.Request) -> web.Response:
        body = _decoded(await request.read(), Registration)
        name, rank = _place(request)
        record = body.record
        if (record.instance, record.rank) != (name, rank):
            raise DiscoveryError(
                DiscoveryFault.MALFORMED,
                f"the record is of {record.peer}, and the path names {name}/{rank}",
            )
        if self.registry.register(record, time.monotonic(), body.lease_s):
            self._waiters.wake(name)
        log.info("registered instance=%s rank=%d incarnation=%x", name, rank, record.incarnation)
        return web.Response(status=204)

    async def _renew(self, request: web.Request) -> web.Response:
        body = _decoded(await request.read(), Renewal)
        name, rank = _place(request)
        self.registry.renew(name, rank, body.incarnation, time.monotonic(), body.lease_s)
        return web.Response(status=204)

    async def _leave(self, request: web.Request) -> web.Response:
        name, rank = _place(request)
        incarnation = _whole(request.query.get("incarnation", ""), "incarnation", MAX_ID)
        if self.registry.leave(name, rank, incarnation):
            self._waiters.wake(name)
        log.info("left instance=%s rank=%d incarnation=%x", name, rank, incarnation)
        return web.Response(status=204)

    async def _view(self, request: web.Request) -> web.Response:
        view = _decoded(await request.read(), EndpointStatus)
        name, rank = _place(request)
        if (view.instance, view.rank) != (name, rank):
            raise DiscoveryError(
                DiscoveryFault.MALFORMED,
                f"the view is of {view.name}, and the path names {name}/{rank}",
            )
        return _json(self.lookout.take(view))

    async def _unview(self, request: web.Request) -> web.Response:
        name, rank = _place(request)
        incarnation = _whole(request.query.get("incarnation", ""), "incarnation", MAX_ID)
        if not self.lookout.leave(f"{name}/{rank}", incarnation):
            raise DiscoveryError(
                DiscoveryFault.NO_LEASE, f"{name}/{rank} has told no view in that life"
            )
        return web.Response(status=204)

    # ------------------------------------------------------------ requests of others

    async def _instance(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        had = request.query.get("version", "")
        deadline = time.monotonic() + _wait_s(request.query.get("wait_s", "0"))
        while True:
            view = self.registry.resolve(name)
            if view is not None and view.version != had:
                return _json(view)
            ended = view is None and had and not self._unsettled(had)
            now = time.monotonic()
            if ended or now >= deadline:
                break
            until = min(deadline, self._settled_at) if self._unsettled(had) else deadline
            await self._waiters.wait(name, until - now)
        return self._no_news(name, had, view)

    def _unsettled(self, had: str) -> bool:
        """Whether that version was another registry's, whose ranks may still come to this one."""
        foreign = had != "" and not had.startswith(f"{self.registry.epoch}.")
        return foreign and time.monotonic() < self._settled_at

    def _no_news(self, name: str, had: str, view: InstanceView | None) -> web.Response:
        if view is not None:
            return web.Response(status=304)
        if self._unsettled(had):
            raise DiscoveryError(
                DiscoveryFault.SETTLING,
                "the discovery service has just started; ask again in a moment",
            )
        raise DiscoveryError(DiscoveryFault.INCOMPLETE, self.registry.explain(name))

    async def _list(self, request: web.Request) -> web.Response:
        return _json(Summaries(self.registry.summaries()))

    async def _health(self, request: web.Request) -> web.Response:
        nonce = request.query.get("nonce", "")
        told = self._guard.introduce(nonce) if self._guard is not None else Introduction()
        return _json({"status": "ok", **(msgspec.structs.asdict(told) if told.life else {})})

    async def _metrics(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(), headers=content)


# ---------------------------------------------------------------- reading and writing


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvferryError) as error:
        raise DiscoveryError(DiscoveryFault.MALFORMED, f"the body can't be used: {error}") from None


def _place(request: web.Request) -> tuple[str, int]:
    rank = _whole(request.match_info["rank"], "rank", 1 << 16)
    return request.match_info["name"], rank


def _whole(text: str, what: str, most: int) -> int:
    if not WHOLE.fullmatch(text) or int(text) > most:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"{what} must be a whole number from 0 to {most}, not {text!r:.40}",
        )
    return int(text)


def _wait_s(text: str) -> float:
    if not DECIMAL.fullmatch(text) or float(text) > MAX_WAIT_S:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"wait_s must be from 0 to {MAX_WAIT_S:g} seconds, not {text!r:.40}",
        )
    return float(text)


def _json(content: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(fault: DiscoveryFault, message: str) -> web.Response:
    return _json(DiscoveryErrorDocument(DiscoveryErrorBody(fault, message)), STATUS[fault])


def _translated(error: web.HTTPException) -> tuple[DiscoveryFault, str]:
    """What aiohttp itself refuses, in our words."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            return DiscoveryFault.OVERSIZED, f"a body may have {MAX_BODY_BYTES} bytes"
        case web.HTTPMethodNotAllowed():
            return (
                DiscoveryFault.METHOD,
                f"this path takes {', '.join(sorted(error.allowed_methods))}",
            )
        case web.HTTPNotFound():
            return DiscoveryFault.NOT_FOUND, "there is no such path; see docs/discovery.md"
        case _:
            return DiscoveryFault.MALFORMED, error.reason
