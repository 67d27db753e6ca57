"""The router's HTTP application: routes around the forwarder and the worker watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from aiohttp import web

from kvferry import ClusterKey, discovery_at
from kvferry.dashboard.routes import PageRoutes, is_guarded
from kvferry.http.api_errors import (
    CLIENT_LEFT,
    ApiError,
    Handler,
    json_response,
    read_body,
    respond,
)
from kvferry.router.adapters import adapter_of
from kvferry.router.bodies import RequestDefaults, new_id, parse_call
from kvferry.router.forward import Forwarder
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions, named_url
from kvferry.router.status import RouterStatus, worker_status
from kvferry.router.upstream import cancel_and_wait, client_error
from kvferry.router.watch import WorkerWatch
from kvferry.router.worker_pool import AnnouncedWorker, WorkerPool, WorkerRole
from kvferry.security.signing import RequestVerifier
from kvferry.security.tokens import token_problem

log = logging.getLogger("kvferry.router")

MAX_BODY_BYTES = 8 << 20
FAILURE_HEADER = "X-Kvferry-On-Failure"


class Router:
    """Handlers of the routes, and the objects that live as long as the application."""

    def __init__(self, options: RouterOptions, key: ClusterKey | None = None) -> None:
        adapter = adapter_of(options.engine, options.decode_engine)
        fixed = [
            AnnouncedWorker(url, role, name)
            for role, urls in (
                (WorkerRole.PREFILL, options.prefill_urls),
                (WorkerRole.DECODE, options.decode_urls),
            )
            for name, url in map(named_url, urls)
        ]
        self._options = options
        self.pool = WorkerPool(options.policy, options.lost_s, fixed, options.max_in_flight)
        self.metrics = RouterMetrics(self.pool)
        self._adapter = adapter
        self._forwarder = Forwarder(options, self.pool, self.metrics, adapter, key)
        where = options.discovery
        discovery = discovery_at(where, key) if where is not None else None
        self._discovery = discovery
        self._watch = WorkerWatch(options, self.pool, discovery, key, adapter.check_health)
        self._status = RouterStatus(discovery, self.pool, key)
        self._key = key.http if key is not None else None
        self._verifier = RequestVerifier(self._key) if self._key is not None else None
        self._since = int(time.time())

    def application(self) -> web.Application:
        """Return the application; the worker watch runs while it does."""
        app = web.Application(middlewares=[self._measure], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics_text),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._one_model),
                web.post("/drain/{worker:.+}", self._drain),
                web.post("/v1/completions", self._answer),
                web.post("/v1/chat/completions", self._answer),
                *PageRoutes(self._status).routes(),
            ]
        )
        app.cleanup_ctx.append(self._watching)
        return app

    async def _watching(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch.run())
        yield
        await cancel_and_wait(task)
        await self._forwarder.close()
        await self._status.close()
        if self._discovery is not None:
            await self._discovery.close()

    # ------------------------------------------------------------ middleware

    @web.middleware
    async def _measure(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route.resource
        path, began = route.canonical if route is not None else "other", time.monotonic()
        status = str(CLIENT_LEFT)
        try:
            response = await respond(request, partial(self._guarded, handler), log)
            status = str(response.status)
            return response
        finally:
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - began)

    async def _guarded(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        self._check_token(request)
        return await handler(request)

    def _check_token(self, request: web.Request) -> None:
        """Demand a token for the dashboard's documents; the API needs none."""
        if self._key is None or not is_guarded(request.path):
            return
        header = request.headers.get("Authorization", "")
        problem = token_problem(self._key, header, time.time())
        if problem is not None:
            raise ApiError(401, problem, code="token")

    # ------------------------------------------------------------ API

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        data = await read_body(request)
        header = request.headers.get(FAILURE_HEADER)
        seed = new_id() if self._adapter.needs_seed else None
        defaults = RequestDefaults(self._model, self._options.on_failure, seed)
        call = parse_call(request.path, data, header, defaults)
        return await self._forwarder.answer(request, call)

    def _model(self, name: str | None) -> str:
        """Return the requested model, or the only one if none is requested."""
        models = self.pool.models()
        if not models:
            message = "no decode worker is up; start one, or wait"
            raise ApiError(503, message, code="no_decode_worker")
        if name is None and len(models) == 1:
            return models[0]
        if name in models:
            return str(name)
        status, problem = (
            (400, "name a model") if name is None else (404, f"no model {name!r:.200}")
        )
        message = f"{problem}; available: {', '.join(models)}"
        raise ApiError(status, message, code="model_not_found", param="model")

    async def _list_models(self, request: web.Request) -> web.Response:
        data = [self._model_entry(model) for model in self.pool.models()]
        return json_response({"object": "list", "data": data})

    async def _one_model(self, request: web.Request) -> web.Response:
        return json_response(self._model_entry(self._model(request.match_info["model"])))

    def _model_entry(self, model: str) -> dict[str, object]:
        return {"id": model, "object": "model", "created": self._since, "owned_by": "kvferry"}

    # ------------------------------------------------------------ operation

    async def _health(self, request: web.Request) -> web.Response:
        about: dict[str, object] = {"role": "router", "status": "ok"}
        if self._verifier is not None:
            introduction = self._verifier.introduce(request.query.get("nonce", ""))
            about |= msgspec.to_builtins(introduction)
        workers = [msgspec.to_builtins(worker_status(worker)) for worker in self.pool.workers]
        return json_response(about | {"workers": workers})

    async def _drain(self, request: web.Request) -> web.Response:
        """Send no new requests to a worker, and have it end after the last one."""
        self._demand_signed(request, await read_body(request))
        name = request.match_info["worker"]
        found = [worker for worker in self.pool.workers if name in (worker.name, worker.url)]
        if len(found) != 1:
            message = f"{len(found)} workers are called {name!r:.200}; GET /healthz lists them"
            raise ApiError(404, message, code="not_found")
        failure = await self._forwarder.drain(found[0])
        if failure is not None:
            raise client_error(failure)
        return json_response({"status": "draining"})

    def _demand_signed(self, request: web.Request, body: bytes) -> None:
        """Refuse a request that is not signed with the cluster key, if there is one."""
        if self._verifier is not None:
            header, now = request.headers.get("Authorization", ""), time.time()
            refused = self._verifier.check(header, request.method, request.raw_path, body, now)
            if refused is not None:
                raise ApiError(401, refused.message, code=f"ticket_{refused.fault}")

    async def _metrics_text(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(), headers=content)
