"""Routes of the page: the page itself, and the documents that it is made from.

Discovery and the router both have them, each with its own ``StatusSource`` behind. What is
asked here changes nothing. With a cluster key it takes a token (``security/tokens.py``); the
page's own files name nobody, so anybody may have them.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Protocol

import msgspec
from aiohttp import web

from kvferry.dashboard.drawing import waterfall_svg
from kvferry.telemetry.reports import ClusterView
from kvferry.telemetry.waterfall import Waterfall

PAGE = "/"
FILES = "/kvferry/page/{file}"
CLUSTER = "/kvferry/cluster"
STORY = "/kvferry/traces/{room:.+}"
PLAN = "/kvferry/plan"
# What a token opens; no more begins like this.
GUARDED = (CLUSTER, "/kvferry/traces/", PLAN)
KINDS = {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
# Nothing from elsewhere, in no frame of anybody's.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self' "
    "'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class StatusSource(Protocol):
    """Who knows how the cluster is."""

    async def look(self) -> ClusterView:
        """The cluster now."""

    async def waterfall(self, room: str) -> Waterfall | None:
        """A room's trace; None if nobody knows it."""

    async def plan(self, source: str, target: str) -> str:
        """The plan's picture of two instances, as SVG. Raises ``LookupError`` with a sentence."""


class PageRoutes:
    """The handlers. Errors are raised as aiohttp's, and whoever serves puts them into words."""

    def __init__(self, lookout: StatusSource) -> None:
        self._lookout = lookout

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get(PAGE, self._page),
            web.get(FILES, self._file),
            web.get(CLUSTER, self._cluster),
            web.get(STORY, self._story),
            web.get(PLAN, self._plan),
        ]

    async def _page(self, request: web.Request) -> web.Response:
        return _static("index.html", "text/html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in KINDS:
            raise web.HTTPNotFound
        return _static(name, KINDS[name])

    async def _cluster(self, request: web.Request) -> web.Response:
        return _document(await self._lookout.look())

    async def _story(self, request: web.Request) -> web.Response:
        room = request.match_info["room"][:1024]
        waterfall = await self._lookout.waterfall(room)
        if waterfall is None:
            text = f"no endpoint remembers the room {room:.200}; each keeps its last ones only"
            return _document({"error": {"code": "not-found", "message": text}}, 404)
        if request.query.get("as") == "svg":
            svg = waterfall_svg(waterfall)
            return web.Response(text=svg, content_type="image/svg+xml", headers=HEADERS)
        return _document(waterfall)

    async def _plan(self, request: web.Request) -> web.Response:
        asked = request.query
        try:
            svg = await self._lookout.plan(asked.get("source", ""), asked.get("target", ""))
        except LookupError as error:
            return _document({"error": {"code": "not-found", "message": error.args[0]}}, 404)
        return web.Response(text=svg, content_type="image/svg+xml", headers=HEADERS)


def is_guarded(path: str) -> bool:
    """Whether a token opens this path."""
    return path.startswith(GUARDED)


def is_open(path: str) -> bool:
    """Whether anybody may have this: the page without what it shows."""
    return path == PAGE or path.startswith("/kvferry/page/")


def _static(name: str, kind: str) -> web.Response:
    body = files("kvferry.dashboard").joinpath("page", name).read_bytes()
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


def _document(content: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
