"""Admission of requests to a discovery or status service: signatures, errors, counts.

Responses are JSON, errors are always ``{"error": {"code", "message"}}``, and no request can make a
service return a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from prometheus_client import Counter

from kvferry.dashboard.routes import is_guarded, is_open
from kvferry.discovery.http.messages import DiscoveryErrorBody, DiscoveryErrorDocument
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.errors import KvferryError
from kvferry.ids import MAX_ID
from kvferry.security.signing import SCHEME, Introduction, RequestVerifier, SignatureFault
from kvferry.security.tokens import token_problem

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("kvferry.discovery")

MAX_BODY_BYTES = 1 << 20
BODY_S = 10.0
WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
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


class RequestGate:
    """Admits the requests of one service, and turns every exception into an error response.

    ``requests`` counts them by route and status.
    """

    def __init__(self, signing_key: bytes | None, requests: Counter) -> None:
        self._verifier = RequestVerifier(signing_key) if signing_key is not None else None
        self._signing_key = signing_key
        self._requests = requests

    def application(self) -> web.Application:
        """Return an application whose requests pass this gate."""
        app = web.Application(middlewares=[self._handle], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/healthz", self._get_health)
        return app

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
            self._requests.labels(asked, str(status)).inc()

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

    async def _get_health(self, request: web.Request) -> web.Response:
        nonce = request.query.get("nonce", "")
        found = self._verifier.introduce(nonce) if self._verifier is not None else Introduction()
        proof = msgspec.structs.asdict(found) if found.life else {}
        return json_response({"status": "ok"} | proof)


# ---------------------------------------------------------------- parsing and encoding


def decoded(body: bytes, kind: type[T]) -> T:
    """Return a request's body as a value. Raises ``DiscoveryError``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvferryError) as error:
        raise DiscoveryError(DiscoveryFault.MALFORMED, f"the body is malformed: {error}") from None


def rank_in(request: web.Request) -> tuple[str, int]:
    """Return the instance and the rank that a path names."""
    return request.match_info["name"], whole(request.match_info["rank"], "rank", 1 << 16)


def demand_same(in_body: str, in_path: str) -> None:
    """Raise ``DiscoveryError`` unless the body is for the rank of the path."""
    if in_body != in_path:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"the body is for {in_body}, but the path names {in_path}; send one rank",
        )


def whole(text: str, what: str, most: int) -> int:
    """Return a whole number from 0 to ``most``. Raises ``DiscoveryError``."""
    if not WHOLE.fullmatch(text) or int(text) > most:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"{what} must be a whole number from 0 to {most}, not {text!r:.40}",
        )
    return int(text)


def incarnation_in(request: web.Request) -> int:
    """Return the incarnation of a query. Raises ``DiscoveryError``."""
    return whole(request.query.get("incarnation", ""), "incarnation", MAX_ID)


def metrics_response(text: bytes) -> web.Response:
    """Return metrics in Prometheus's text format."""
    content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=text, headers=content)


def json_response(content: object, status: int = 200) -> web.Response:
    """Return a value as a JSON response."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def _error(fault: DiscoveryFault, message: str) -> web.Response:
    return json_response(DiscoveryErrorDocument(DiscoveryErrorBody(fault, message)), STATUS[fault])


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
