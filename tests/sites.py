"""HTTP applications of tests, served from a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry

from kvferry.discovery.loop_thread import LoopThread
from kvferry.http.connections import Connections
from kvferry.http.limits import HttpLimits
from kvferry.http.listening import bind_socket, http_url
from kvferry.http.site import HttpSite

HOST = "127.0.0.1"
START_S = 30.0


@contextmanager
def serve_app(app: web.Application, *, shutdown_s: float = 1.0) -> Iterator[str]:
    """Serve an application and yield its URL. At the end every connection is closed.

    It is the product's own site. aiohttp's runner alone leaves a connection open that is accepted
    while it stops, such as that of a client that has already given up.
    """
    site = HttpSite(app, Connections(HttpLimits(), CollectorRegistry()), shutdown_s=shutdown_s)
    thread = LoopThread("test-site", site.stop)
    try:
        listener = bind_socket(HOST, 0)
        thread.run(site.start(listener), START_S)
        yield http_url(HOST, listener)
    finally:
        thread.close()
