"""The routes of a worker: one event loop, which hands jobs to the engine's thread.

If a caller leaves, its handler is cancelled, and with it the job. The first news
of a job decide the status of its answer, also of a streamed one: what fails
before its first token is an error like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import web

from kvferry import ClusterKey
from kvferry.http.api_errors import ApiError, from_http_exception, json_response
from kvferry.reference.api.access import UNSIGNED, AccessCheck, refused
from kvferry.reference.api.answers import Document, Writer, writer_for
from kvferry.reference.api.bodies import Ask, Serving, parse_chat, parse_completion
from kvferry.reference.api.metrics import WorkerMetrics
from kvferry.reference.api.pending import PendingAnswer
from kvferry.reference.api.readers import BodyReaders
from kvferry.reference.api.rooms import ASK_S, RoomAsker, room_end
from kvferry.reference.worker.ends import TooManyWaiting
from kvferry.reference.worker.jobs import AnswerPiece
from kvferry.reference.worker.loop import EngineLoop
from kvferry.security.signing import RequestVerifier
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 8 << 20
BODY_S = 30.0
END = b"data: [DONE]\n\n"


class Api:
    """What a worker answers. ``about`` is shown at ``/healthz``."""

    def __init__(
        self,
        loop: EngineLoop,
        serving: Serving,
        about: Document,
        *,
        deadline_s: float,
        request_s: float,
        key: ClusterKey | None = None,
        guard: RequestVerifier | None = None,
    ) -> None:
        self._loop = loop
        self._serving = serving
        self._about = about
        self._deadline_s = deadline_s
        self._request_s = request_s
        self._created = int(time.time())
        self.metrics = WorkerMetrics(str(about["name"]))
        self._asker = RoomAsker(key)
        self._access = AccessCheck(guard)
        self._readers = BodyReaders()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._frame], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/metrics", self._figures),
                web.get("/kvferry/rooms/{room:.+}", self._room),
                web.delete("/kvferry/rooms/{room:.+}", self._give_up),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        app.cleanup_ctx.append(self._asker.running)
        app.cleanup_ctx.append(self._reading)
        return app

    async def _reading(self, app: web.Application) -> AsyncIterator[None]:
        yield
        self._readers.close()

    # ------------------------------------------------------------ around every request

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ApiError as error:
            level = logging.INFO if error.status < 500 else logging.WARNING
            log.log(
                level, "refused path=%s status=%d reason=%r", request.path, error.status, str(error)
            )
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

    # ------------------------------------------------------------ what is there

    async def _health(self, request: web.Request) -> web.Response:
        gone = self._loop.died.done()
        told = msgspec.to_builtins(self._loop.snapshot)
        status = {"status": "ended" if gone else "ok"}
        who = msgspec.structs.asdict(self._access.introduce(request.query.get("nonce", "")))
        status |= {name: said for name, said in who.items() if said}
        if gone and (reason := self._loop.died.result()) is not None:
            status["problem"] = str(reason)
        return json_response({**status, **self._about, **told}, 503 if gone else 200)

    async def _figures(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        text = self.metrics.text(self._loop.snapshot, self._loop.figures)
        return web.Response(body=text.encode(), headers=content)

    async def _room(self, request: web.Request) -> web.Response:
        """How a room ended; waits a little, because its end is about to be known."""
        self._access.demand_signed(request)
        room = request.match_info["room"]
        try:
            return json_response(await room_end(self._loop.ends, room, ASK_S))
        except TimeoutError:
            raise ApiError(404, f"no room {room:.200} has ended here lately") from None
        except TooManyWaiting as error:
            raise ApiError(503, str(error), code="busy") from None

    async def _give_up(self, request: web.Request) -> web.Response:
        """The router has no use for a room any more; its pages need not wait for the deadline."""
        self._access.demand_signed(request)
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

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat)

    async def _answer(
        self, request: web.Request, parse: Callable[[bytes, Serving], Ask]
    ) -> web.StreamResponse:
        self._access.demand_tried(request)
        body = await _read(request)
        is_signed = self._access.is_signed(request, body)
        ask = await self._readers.read(len(body), partial(parse, body, self._serving))
        if ask.ticket is not None:
            if not is_signed:
                raise refused(UNSIGNED)
            in_room(ask.ticket.room)
        created = int(time.time())
        writer = writer_for(ask, self._serving.model, self._serving.tokenizer, created)
        answer = PendingAnswer(
            self._loop,
            self._asker,
            ask,
            deadline_s=self._deadline_s,
            request_s=self._request_s,
        )
        try:
            if ask.stream:
                return await _stream(request, writer, answer.pieces())
            return json_response(writer.whole([piece async for piece in answer.pieces()]))
        finally:
            answer.end()


async def _stream(
    request: web.Request, writer: Writer, pieces: AsyncIterator[AnswerPiece]
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
        # The status has been sent; the error is the stream's last word.
        await response.write(error.event())
    await response.write_eof()
    return response


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "the body did not come in time; send it again") from None


async def _write(response: web.StreamResponse, documents: list[Document]) -> None:
    if documents:
        lines = (b"data: " + msgspec.json.encode(document) for document in documents)
        await response.write(b"\n\n".join(lines) + b"\n\n")
