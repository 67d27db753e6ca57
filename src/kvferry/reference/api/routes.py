"""The routes of a worker: one event loop, which hands jobs to the engine's thread.

If a caller leaves, its handler is cancelled, and with it the job. The first news of a job
decides the status of its answer, also of a streamed one: a failure before the first token is
an error like any other.

With a cluster key, requests for answers and for rooms must be signed with it, as the router
does. The signature covers the body, and is valid once, for one life of this worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

import msgspec
from aiohttp import web
from msgspec.structs import asdict

from kvferry import ClusterKey
from kvferry.http.api_errors import ApiError, from_http_exception, json_response
from kvferry.reference.api.answers import AnswerWriter, ChatWriter, Document
from kvferry.reference.api.bodies import Serving, parse_chat, parse_completion
from kvferry.reference.api.metrics import WorkerMetrics
from kvferry.reference.api.pending import ROOM_S, RoomAsker, answer_pieces
from kvferry.reference.engine.requests import Produced
from kvferry.reference.worker.jobs import Ask, ServeJob
from kvferry.reference.worker.loop import EngineLoop
from kvferry.security.signing import (
    SCHEME,
    RequestVerifier,
    SignatureFault,
    SignatureRefused,
)
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
BODY_S = 30.0
END = b"data: [DONE]\n\n"
UNSIGNED = SignatureRefused(
    SignatureFault.UNSIGNED,
    "this worker takes only what is signed with the cluster key; ask the router",
)


class Api:
    """The HTTP application of a worker. ``about`` is shown at ``/healthz``."""

    def __init__(
        self,
        loop: EngineLoop,
        serving: Serving,
        about: Document,
        key: ClusterKey | None = None,
        verifier: RequestVerifier | None = None,
    ) -> None:
        self._loop = loop
        self._serving = serving
        self._about = about
        self._created = int(time.time())
        self.metrics = WorkerMetrics(str(about["name"]))
        self._asker = RoomAsker(key)
        self._verifier = verifier

    def application(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(middlewares=[self._frame], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
                web.get("/kvferry/rooms/{room:.+}", self._room),
                web.delete("/kvferry/rooms/{room:.+}", self._abandon),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/completions", partial(self._answer, parse_completion)),
                web.post("/v1/chat/completions", partial(self._answer, parse_chat)),
            ]
        )
        app.cleanup_ctx.append(self._asker.running)
        return app

    @web.middleware
    async def _frame(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Turn errors into answers, log and count them."""
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ApiError as error:
            level = logging.INFO if error.status < 500 else logging.WARNING
            text = "refused path=%s status=%d reason=%r"
            log.log(level, text, request.path, error.status, str(error))
            response = error.response()
        except web.HTTPException as error:
            response = from_http_exception(error, MAX_BODY_BYTES).response()
        except (ConnectionError, web.RequestPayloadError) as error:
            # The caller has left in the middle, and nobody reads this.
            log.info("client-left path=%s reason=%r", request.path, error)
            response = web.Response(status=499)
        except Exception:
            log.exception("request-failed path=%s", request.path)
            message = "this server has a bug; see its log"
            response = ApiError(500, message, code="internal").response()
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "other"
        self.metrics.answered(path, response.status)
        return response

    def _demand_signed(self, request: web.Request, body: bytes = b"") -> None:
        """Refuse a request that is not signed with the cluster key, if there is one."""
        if self._verifier is None:
            return
        header = request.headers.get("Authorization", "")
        fault: SignatureRefused | None = UNSIGNED
        # OpenAI's clients send an ``Authorization`` of another scheme.
        if header.startswith(f"{SCHEME} "):
            now = time.time()
            fault = self._verifier.check(header, request.method, request.raw_path, body, now)
        if fault is not None:
            status = 503 if fault.fault is SignatureFault.FULL else 401
            code = f"ticket_{fault.fault}".replace("-", "_")
            raise ApiError(status, fault.message, code=code)

    # ------------------------------------------------------------ state

    async def _health(self, request: web.Request) -> web.Response:
        died = self._loop.died.done()
        status: Document = {"status": "ended" if died else "ok"}
        if self._verifier is not None:
            introduction = self._verifier.introduce(request.query.get("nonce", ""))
            status |= {name: value for name, value in asdict(introduction).items() if value}
        if died and (reason := self._loop.died.result()) is not None:
            status["problem"] = str(reason)
        snapshot = msgspec.to_builtins(self._loop.snapshot)
        return json_response({**status, **self._about, **snapshot}, 503 if died else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.text(self._loop.snapshot), headers=content)

    async def _room(self, request: web.Request) -> web.Response:
        """Return how a room ended; wait for its end, which is near when decode asks."""
        self._demand_signed(request)
        room = request.match_info["room"]
        end = asyncio.wrap_future(self._loop.ends.wait_for(room))
        try:
            async with asyncio.timeout(ROOM_S):
                # Shielded, because several callers may wait for the same room.
                return json_response(await asyncio.shield(end))
        except TimeoutError:
            raise ApiError(404, f"no room {room:.200} has ended here lately") from None

    async def _abandon(self, request: web.Request) -> web.Response:
        """Free the pages of a room that the router has given up."""
        self._demand_signed(request)
        self._loop.abandon(request.match_info["room"])
        return web.Response(status=204)

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._serving.model:
            message = f"The model {name!r:.200} does not exist; see /v1/models"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(self._card())

    def _card(self) -> Document:
        name = self._serving.model
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvferry"}

    # ------------------------------------------------------------ answers

    async def _answer(
        self, parse: Callable[[bytes, Serving], Ask], request: web.Request
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise ApiError(408, "the body did not come in time; send it again") from None
        self._demand_signed(request, body)
        # Tokenizing a long prompt takes a while.
        ask = await asyncio.to_thread(parse, body, self._serving)
        if ask.ticket is not None:
            in_room(ask.ticket.room)
        serving = self._serving
        job = ServeJob.begin(ask, deadline_s=serving.deadline_s, request_s=serving.request_s)
        kind = ChatWriter if ask.chat else AnswerWriter
        writer = kind(job, serving.model, serving.tokenizer, int(time.time()))
        self._loop.submit(job)
        try:
            async with aclosing(answer_pieces(job, self._asker)) as pieces:
                if ask.stream:
                    return await _stream(request, writer, pieces)
                return json_response(writer.whole([piece async for piece in pieces]))
        finally:
            # Stops the job, unless it was answered.
            self._loop.cancel(job)


async def _stream(
    request: web.Request, writer: AnswerWriter, pieces: AsyncIterator[Produced]
) -> web.StreamResponse:
    first = await anext(pieces)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        await _write(response, writer.chunks(first))
        async for piece in pieces:
            await _write(response, writer.chunks(piece))
        await response.write(END)
    except ApiError as error:
        # The status is sent already, so the error is the stream's last event.
        await response.write(error.event())
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, documents: list[Document]) -> None:
    if documents:
        lines = (b"data: " + msgspec.json.encode(document) for document in documents)
        await response.write(b"\n\n".join(lines) + b"\n\n")
