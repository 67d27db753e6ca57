"""Fake workers that follow the HTTP contract and compute nothing."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvferry.http.connections import Connections
from kvferry.http.limits import HttpLimits
from kvferry.http.site import HttpSite
from kvferry.router.options import RouterOptions
from kvferry.router.serving import serving

MODEL = "m"
WORDS = ["one ", "two ", "three"]

Body = dict[str, Any]
Act = Callable[["FakeWorker", web.Request, Body], Awaitable[web.StreamResponse]]


async def until(holds: Callable[[], object]) -> None:
    """Wait for something that is about to be; the test's own bound ends it."""
    while not holds():
        await asyncio.sleep(0.01)


class Wire:
    """The state that fake workers share: the rooms whose prompt is computed."""

    def __init__(self) -> None:
        self._rooms: dict[int, asyncio.Event] = {}

    def room(self, number: int) -> asyncio.Event:
        return self._rooms.setdefault(number, asyncio.Event())


class FakeWorker:
    """``act`` is what it does with a request; ``left`` counts clients that hung up."""

    def __init__(self, part: str, name: str, wire: Wire, act: Act | None = None) -> None:
        self.role, self.name, self.wire = part, name, wire
        self.act: Act = act or (prefills if part == "prefill" else decodes)
        self.model = MODEL
        self.seen: list[Body] = []
        self.request_ids: list[str | None] = []
        self.traces: list[str | None] = []
        self.left = 0
        self.load = 0
        self.limits: dict[str, int] = {}
        self.gate = asyncio.Event()
        self.num_checks = 0
        self.is_silent = False
        self.problem = ""
        self.status = "ok"
        self.port = 0
        self._site: HttpSite | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._health)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        await self.listen(app)

    async def listen(self, app: web.Application) -> None:
        """As our servers do: who comes in the moment of the end is let in and then closed."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        connections = Connections(HttpLimits(), CollectorRegistry())
        self._site = HttpSite(app, connections, shutdown_s=0.1)
        await self._site.start(listener)

    async def stop(self) -> None:
        if self._site is not None:
            await self._site.stop()

    async def checked_twice(self) -> None:
        """Wait until the router has handled a health check that begins after this call."""
        enough = self.num_checks + 2
        await until(lambda: self.num_checks >= enough)

    async def _health(self, request: web.Request) -> web.Response:
        self.num_checks += 1
        if self.is_silent:
            await asyncio.Event().wait()
        return web.json_response(
            {
                "role": self.role,
                "name": self.name,
                "model": self.model,
                "running": self.load,
                "waiting": 0,
                "free_tokens": 1000,
                "problem": self.problem,
                "status": self.status,
                **self.limits,
            },
            status=503 if self.problem else 200,
        )

    async def _drain(self, request: web.Request) -> web.Response:
        self.status = "draining"
        return web.json_response({"status": self.status})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.request_ids.append(request.headers.get("X-Request-Id"))
        self.traces.append(request.headers.get("traceparent"))
        try:
            return await self.act(self, request, body)
        except asyncio.CancelledError:
            self.left += 1
            raise


# ---------------------------------------------------------------- what they may do


def chunk(text: str, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None}
    document = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(document | {"choices": [choice]} | more).encode() + b"\n\n"


STREAM = b"".join(chunk(word) for word in WORDS) + b"data: [DONE]\n\n"


def completion(text: str, **more: object) -> dict[str, object]:
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    document = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL}
    return document | {"choices": [choice], "usage": usage} | more


def refusal(status: int, code: str | None, message: str) -> web.Response:
    error = {"message": message, "type": "t", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


async def prefills(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    worker.wire.room(body["kvferry"]["room"]).set()
    return web.json_response(completion(WORDS[0]))


async def decodes(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    """Answers once the room's prompt is there; without a room at once."""
    own = body.get("kvferry")
    source = "local" if own is None else "transferred"
    if own is not None:
        await worker.wire.room(own["room"]).wait()
    if not body.get("stream"):
        return web.json_response(completion("".join(WORDS), kvferry={"source": source}))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(STREAM)
    return response


async def decodes_later(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    """Answers once the test opens the worker's gate."""
    await worker.gate.wait()
    return await decodes(worker, request, body)


async def dies(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def loses_the_cache(
    worker: FakeWorker, request: web.Request, body: Body
) -> web.StreamResponse:
    """The transfer fails, unless there is none."""
    if "kvferry" not in body:
        return await decodes(worker, request, body)
    await worker.wire.room(body["kvferry"]["room"]).wait()
    return refusal(503, "kv_transfer_failed", "the source is gone")


async def loses_the_cache_once(
    worker: FakeWorker, request: web.Request, body: Body
) -> web.StreamResponse:
    act = decodes if len(worker.seen) > 1 else loses_the_cache
    return await act(worker, request, body)


def refuses(status: int, code: str | None, message: str = "no") -> Act:
    async def act(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        return refusal(status, code, message)

    return act


def begins_then(ending: bytes, *, abort: bool) -> Act:
    """Streams one word and some bytes, then ends without saying so or breaks."""

    async def act(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        await worker.wire.room(body["kvferry"]["room"]).wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk(WORDS[0]) + ending)
        if abort:
            assert request.transport is not None
            # The written bytes must leave before the connection breaks.
            await asyncio.sleep(0.05)
            request.transport.abort()
        return response

    return act


async def begins_then_hangs(
    worker: FakeWorker, request: web.Request, body: Body
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(chunk(WORDS[0]))
    return await hangs(worker, request, body)


async def streams_forever(
    worker: FakeWorker, request: web.Request, body: Body
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(chunk("more "))
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- a router among them


class Site:
    """A router, its workers, and a client."""

    def __init__(self, url: str, workers: dict[str, FakeWorker], http: aiohttp.ClientSession):
        self.url, self.workers, self.http = url, workers, http

    def __getitem__(self, name: str) -> FakeWorker:
        return self.workers[name]

    async def post(self, body: object, path: str = "completions", **headers: str) -> Any:
        """Status, headers and bytes of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/v1/{path}"
        async with self.http.post(url, data=io.BytesIO(data), headers=headers) as response:
            return response.status, response.headers, await response.read()

    async def ask(self, **fields: object) -> tuple[int, Any]:
        """A plain completion's status and document."""
        status, _, data = await self.post({"model": MODEL, "prompt": "p"} | fields)
        return status, json.loads(data)

    async def listed(self) -> list[dict[str, Any]]:
        async with self.http.get(f"{self.url}/healthz") as response:
            return list((await response.json())["workers"])

    async def state(self) -> dict[str, Any]:
        return {worker["name"]: worker for worker in await self.listed()}

    async def until_up(self, *names: str, up: bool = True) -> None:
        while True:
            state = await self.state()
            if all(name in state and state[name]["up"] is up for name in names):
                return
            await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        while any(worker["in_flight"] for worker in (await self.state()).values()):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def site(
    num_prefill: int = 1, num_decode: int = 1, acts: dict[str, Act] | None = None, **options: Any
) -> AsyncIterator[Site]:
    """Workers p0, p1, … and d0, d1, …, all up."""
    wire, acts = Wire(), acts or {}
    names = [("prefill", f"p{i}") for i in range(num_prefill)]
    names += [("decode", f"d{i}") for i in range(num_decode)]
    workers = {name: FakeWorker(part, name, wire, acts.get(name)) for part, name in names}
    for worker in workers.values():
        await worker.start()
    urls = {part: tuple(w.url for w in workers.values() if w.role == part) for part, _ in names}
    fields = {"port": 0, "poll_s": 0.05} | {f"{part}_urls": urls[part] for part in urls} | options
    given = msgspec.convert(fields, RouterOptions)
    try:
        async with serving(given) as url, aiohttp.ClientSession() as http:
            here = Site(url, workers, http)
            await here.until_up(*workers)
            yield here
    finally:
        for worker in workers.values():
            await worker.stop()
        # A connection that was accepted while its server closed learns now that it has ended.
        await asyncio.sleep(0.05)
