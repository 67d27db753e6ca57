"""The discovery service's HTTP handlers around the registry, and its clock.

Everything here runs in one event loop. Responses are JSON (except the metrics), errors are always
``{"error": {"code", "message"}}``, and no request can make the service return a traceback.
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
from kvferry.discovery.http.cluster_status import DiscoveryStatus
from kvferry.discovery.http.messages import (
    DiscoveryErrorBody,
    DiscoveryErrorDocument,
    Registration,
    Renewal,
)
from kvferry.discovery.http.metrics import DiscoveryMetrics
from kvferry.discovery.http.waiters import Waiters
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView, Summaries
from kvferry.discovery.registry import InstanceRegistry
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
# A tick that is so late means that the process was stopped, so ranks could not renew.
STALL_S = 1.0
WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?", re.ASCII)
RANK_PATH = "/v1/instances/{name}/ranks/{rank}"

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
# The client closed the connection, in nginx's numbering.
CLIENT_LEFT = 499
FAULTS = {
    SignatureFault.UNSIGNED: DiscoveryFault.UNSIGNED,
    SignatureFault.OTHER_KEY: DiscoveryFault.UNSIGNED,
    SignatureFault.CLOCK: DiscoveryFault.UNSIGNED,
    SignatureFault.OTHER_LIFE: DiscoveryFault.OTHER_LIFE,
    SignatureFault.REPLAYED: DiscoveryFault.REPLAYED,
    SignatureFault.FULL: DiscoveryFault.FULL,
}
# Open to clients without the key. Neither contains names.
OPEN_PATHS = ("/healthz", "/metrics")


class DiscoveryService:
    """One discovery service: its registry, and the handlers of its requests.

    After a start the registry is empty although ranks may be running. Until ``settle_s`` have
    passed, the service does not tell clients with a view from before that their instance ended.
    """

    def __init__(self, signing_key: bytes | None, settle_s: float) -> None:
        self.registry = InstanceRegistry(secrets.token_hex(4))
        self._waiters = Waiters()
        self.metrics = DiscoveryMetrics(self.registry, self._waiters)
        self._verifier = RequestVerifier(signing_key) if signing_key is not None else None
        self._settled_at = time.monotonic() + settle_s
        self._signing_key = signing_key
        self._status = DiscoveryStatus(self.registry)

    def application(self) -> web.Application:
        """Return the routes. While the application runs, leases expire."""
        app = web.Application(middlewares=[self._handle], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._get_health),
                web.get("/metrics", self._get_metrics),
                web.get("/v1/instances", self._get_list),
                web.get("/v1/instances/{name}", self._get_instance),
                web.put(RANK_PATH, self._put_rank),
                web.put(f"{RANK_PATH}/lease", self._put_lease),
                web.delete(RANK_PATH, self._delete_rank),
                web.put(f"{RANK_PATH}/view", self._put_view),
                web.delete(f"{RANK_PATH}/view", self._delete_view),
                *PageRoutes(self._status).routes(),
            ]
        )
        app.cleanup_ctx.append(self._clock)
        return app

    def stop_waiting(self) -> None:
        """Answer every waiting request; later ones do not wait."""
        self._waiters.close()

    # ------------------------------------------------------------ middleware

    @web.middleware
    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLIENT_LEFT
        try:
            response = await self._respond(request, handler)
            status = response.status
            return response
        except asyncio.CancelledError as error:
            # aiohttp cancels the handler when the client closes the connection.
            log.info("client-left method=%s path=%s reason=%r", request.method, request.path, error)
            raise
        finally:
            route = request.match_info.route.resource
            asked = f"{request.method} {route.canonical}" if route is not None else "other"
            self.metrics.requests.labels(asked, str(status)).inc()

    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request, and turn every exception into an error response."""
        try:
            await self._admit(request)
            return await handler(request)
        except DiscoveryError as error:
            return _error(error.fault, str(error))
        except web.HTTPException as error:
            return _error(*_fault_of(error))
        except (ConnectionError, web.RequestPayloadError) as error:
            # The client has left, and does not read the response.
            log.info("client-left method=%s path=%s reason=%r", request.method, request.path, error)
            return web.Response(status=CLIENT_LEFT)
        except Exception:
            log.exception("request-failed method=%s", request.method)
            return _error(DiscoveryFault.INTERNAL, "the discovery service has a bug; see its log")

    async def _admit(self, request: web.Request) -> None:
        """Read the body within limits of time and size, and check the signature."""
        header = request.headers.get("Authorization", "")
        if not header:
            # Refuse unsigned requests before reading their bodies.
            self._demand_signature(request, header, b"")
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise DiscoveryError(
                DiscoveryFault.SLOW, f"the body did not arrive within {BODY_S:g} s; send it again"
            ) from None
        self._demand_signature(request, header, body)

    def _demand_signature(self, request: web.Request, header: str, body: bytes) -> None:
        if self._verifier is None or request.path in OPEN_PATHS or is_open(request.path):
            return
        if is_guarded(request.path) and not header.startswith(f"{SCHEME} "):
            self._demand_token(header)
            return
        target, now = request.raw_path, time.time()
        refused = self._verifier.check(header, request.method, target, body, now)
        if refused is not None:
            raise DiscoveryError(FAULTS[refused.fault], refused.message)

    def _demand_token(self, header: str) -> None:
        assert self._signing_key is not None
        problem = token_problem(self._signing_key, header, time.time())
        if problem is not None:
            raise DiscoveryError(DiscoveryFault.UNSIGNED, problem)

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
        body = _decoded(await request.read(), Registration)
        record, name, rank = body.record, *_rank_in(request)
        _demand_same(str(record.peer), f"{name}/{rank}")
        if self.registry.register(record, time.monotonic(), body.lease_s):
            self._waiters.wake(name)
        log.info("registered instance=%s rank=%d incarnation=%x", name, rank, record.incarnation)
        return web.Response(status=204)

    async def _put_lease(self, request: web.Request) -> web.Response:
        body = _decoded(await request.read(), Renewal)
        name, rank = _rank_in(request)
        self.registry.renew(name, rank, body.incarnation, time.monotonic(), body.lease_s)
        return web.Response(status=204)

    async def _delete_rank(self, request: web.Request) -> web.Response:
        name, rank = _rank_in(request)
        incarnation = _whole(request.query.get("incarnation", ""), "incarnation", MAX_ID)
        if self.registry.withdraw(name, rank, incarnation):
            self._waiters.wake(name)
        log.info("left instance=%s rank=%d incarnation=%x", name, rank, incarnation)
        return web.Response(status=204)

    async def _put_view(self, request: web.Request) -> web.Response:
        view = _decoded(await request.read(), EndpointStatus)
        name, rank = _rank_in(request)
        _demand_same(view.name, f"{name}/{rank}")
        return _json(self._status.take(view))

    async def _delete_view(self, request: web.Request) -> web.Response:
        name, rank = _rank_in(request)
        incarnation = _whole(request.query.get("incarnation", ""), "incarnation", MAX_ID)
        if not self._status.leave(f"{name}/{rank}", incarnation):
            raise DiscoveryError(
                DiscoveryFault.NO_LEASE,
                f"there is no view of this incarnation of {name}/{rank}; check the incarnation",
            )
        return web.Response(status=204)

    # ------------------------------------------------------------ requests of others

    async def _get_instance(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        version = request.query.get("version", "")
        deadline = time.monotonic() + _wait_s(request.query.get("wait_s", "0"))
        while True:
            view = self.registry.resolve(name)
            if view is not None and view.version != version:
                return _json(view)
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
        return _json(Summaries(self.registry.summaries()))

    async def _get_health(self, request: web.Request) -> web.Response:
        nonce = request.query.get("nonce", "")
        found = self._verifier.introduce(nonce) if self._verifier is not None else Introduction()
        return _json({"status": "ok", **(msgspec.structs.asdict(found) if found.life else {})})

    async def _get_metrics(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(), headers=content)


# ---------------------------------------------------------------- parsing and encoding


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvferryError) as error:
        raise DiscoveryError(DiscoveryFault.MALFORMED, f"the body is malformed: {error}") from None


def _rank_in(request: web.Request) -> tuple[str, int]:
    return request.match_info["name"], _whole(request.match_info["rank"], "rank", 1 << 16)


def _demand_same(in_body: str, in_path: str) -> None:
    if in_body != in_path:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"the body is for {in_body}, but the path names {in_path}; send one rank",
        )


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


def _fault_of(error: web.HTTPException) -> tuple[DiscoveryFault, str]:
    """Return fault and message for an error that aiohttp raises itself."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            return DiscoveryFault.OVERSIZED, f"a body may have at most {MAX_BODY_BYTES} bytes"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return DiscoveryFault.METHOD, f"this path takes {allowed}"
        case web.HTTPNotFound():
            return DiscoveryFault.NOT_FOUND, "there is no such path; see docs/discovery.md"
        case _:
            return DiscoveryFault.MALFORMED, error.reason
