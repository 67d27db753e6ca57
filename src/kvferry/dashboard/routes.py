"""HTTP routes of the dashboard: the page, and the documents that it shows.

The discovery service and the router serve them, each with its own ``StatusSource``. All routes
are read-only. In a cluster with a key the documents need a token (``security/tokens.py``); the
page's own files hold nothing about the cluster and are public.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Protocol

import msgspec
from aiohttp import web

from kvferry.dashboard.drawing import waterfall_html
from kvferry.telemetry.status import ClusterStatus
from kvferry.telemetry.waterfall import Waterfall

PAGE = "/"
FILES = "/kvferry/page/"
CLUSTER = "/kvferry/cluster"
TRACES = "/kvferry/traces/"
PLAN = "/kvferry/plan"
INDEX = "index.html"
KINDS = {
    INDEX: "text/html",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}
# No content from other hosts, and no embedding in other pages.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self' "
    "'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusSource(Protocol):
    """Provider of the documents."""

    async def look(self) -> ClusterStatus:
        """Return the cluster's status."""

    async def waterfall(self, room: str) -> Waterfall | None:
        """Return a room's waterfall; None if no endpoint knows the room."""

    async def plan(self, source: str, target: str) -> str:
        """Return the plan between two instances as SVG. Raise ``LookupError`` with a message."""


class PageRoutes:
    """The handlers. The server turns exceptions into error responses."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.get(PAGE, self._file),
            web.get(FILES + "{file}", self._file),
            web.get(CLUSTER, self._cluster),
            web.get(TRACES + "{room:.+}", self._trace),
            web.get(PLAN, self._plan),
        ]

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("file", INDEX)
        if name not in KINDS:
            raise web.HTTPNotFound
        content = files("kvferry.dashboard").joinpath("page", name).read_bytes()
        return _response(content, KINDS[name])

    async def _cluster(self, request: web.Request) -> web.Response:
        return _document(await self._source.look())

    async def _trace(self, request: web.Request) -> web.Response:
        room = request.match_info["room"][:1024]
        waterfall = await self._source.waterfall(room)
        if waterfall is None:
            return _not_found(
                f"no endpoint remembers the room {room:.200}; each keeps only its last rooms"
            )
        if request.query.get("as") == "html":
            return _response(waterfall_html(waterfall).encode(), "text/html")
        return _document(waterfall)

    async def _plan(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            plan = await self._source.plan(query.get("source", ""), query.get("target", ""))
        except LookupError as error:
            return _not_found(error.args[0])
        return _response(plan.encode(), "image/svg+xml")


def is_guarded(path: str) -> bool:
    """Return whether a token gives access to this path."""
    return path.startswith((CLUSTER, TRACES, PLAN))


def is_open(path: str) -> bool:
    """Return whether this path is public: the page without its documents."""
    return path == PAGE or path.startswith(FILES)


def _document(content: object, status: int = 200) -> web.Response:
    return _response(msgspec.json.encode(content), "application/json", status)


def _not_found(message: str) -> web.Response:
    return _document({"error": {"code": "not-found", "message": message}}, 404)


def _response(body: bytes, kind: str, status: int = 200) -> web.Response:
    return web.Response(
        body=body, status=status, content_type=kind, charset="utf-8", headers=HEADERS
    )
