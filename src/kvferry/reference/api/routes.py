"""The routes of a worker: they hand jobs to the engine's service.

If a caller leaves, its handler is cancelled, and with it the job. The first news of a job
decides the status of its answer, also of a streamed one: a failure before the first token is
an error like any other.

With a cluster key, requests for answers must be signed with it, as the router does. The
signature covers the body, and is valid once, for one life of this worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import asdict
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from kvferry.http.api_errors import ApiError, Handler, json_response, read_body, respond
from kvferry.reference.api.bodies import Serving, parse_chat, parse_completion
from kvferry.reference.engine.requests import Produced
from kvferry.reference.worker.service import EngineService, JobFailed, ServeJob, Trouble
from kvferry.security.signing import RequestVerifier, SignatureFault
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
# When a client may ask a full worker again.
RETRY_S = 1
END = b"data: [DONE]\n\n"


Document = dict[str, Any]


class Api:
    """The HTTP application of a worker; ``registry`` is for metrics of its connections."""

    def __init__(
        self,
        service: EngineService,
        serving: Serving,
        verifier: RequestVerifier | None,
        drain: Callable[[], None],
    ) -> None:
        self._service = service
        self._serving = serving
        self._verifier = verifier
        self._begin_drain = drain
        self.registry = CollectorRegistry()

    def application(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/drain", self._drain),
                web.post("/v1/completions", partial(self._answer, parse_completion)),
                web.post("/v1/chat/completions", partial(self._answer, parse_chat)),
            ]
        )
        return app

    def _demand_signed(self, request: web.Request, body: bytes) -> None:
        """Refuse a request that is not signed with the cluster key, if there is one."""
        if self._verifier is None:
            return
        header = request.headers.get("Authorization", "")
        target, now = request.raw_path, time.time()
        refused = self._verifier.check(header, request.method, target, body, now)
        if refused is not None:
            status = 503 if refused.fault is SignatureFault.FULL else 401
            code = f"ticket_{refused.fault}".replace("-", "_")
            raise ApiError(status, f"{refused.message}, or ask the router", code=code)

    async def _health(self, request: web.Request) -> web.Response:
        options, died = self._serving.options, self._service.died
        about: Document = {"role": options.role, "name": options.name, "model": options.model}
        if self._verifier is not None:
            introduction = self._verifier.introduce(request.query.get("nonce", ""))
            about |= {name: value for name, value in asdict(introduction).items() if value}
        status = "draining" if self._service.is_draining else "ok"
        about |= {"status": "ended" if died.done() else status} | self._service.state()
        if died.done() and died.result() is not None:
            about["problem"] = str(died.result())
        return json_response(about, 503 if died.done() else 200)

    async def _drain(self, request: web.Request) -> web.Response:
        self._demand_signed(request, await read_body(request))
        self._begin_drain()
        return json_response({"status": "draining"})

    async def _metrics(self, request: web.Request) -> web.Response:
        content = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        text = generate_latest(self.registry) + generate_latest(REGISTRY)
        return web.Response(body=text, headers=content)

    async def _models(self, request: web.Request) -> web.Response:
        name = self._serving.options.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "kvferry"}
        return json_response({"object": "list", "data": [card]})

    async def _answer(
        self, parse: Callable[[bytes, Serving], ServeJob], request: web.Request
    ) -> web.StreamResponse:
        body = await read_body(request)
        self._demand_signed(request, body)
        # Tokenizing a long prompt takes a while.
        job = await asyncio.to_thread(parse, body, self._serving)
        if job.ticket is not None:
            in_room(job.ticket.room)
        writer = AnswerWriter(job, self._serving.options.model)
        self._service.submit(job)
        try:
            async with aclosing(_pieces(job)) as pieces:
                if job.streams:
                    return await _stream(request, writer, pieces)
                return json_response(writer.whole([piece async for piece in pieces]))
        finally:
            # Stops the job, unless it was answered.
            self._service.cancel(job)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    return await respond(request, handler, log)


async def _pieces(job: ServeJob) -> AsyncGenerator[Produced]:
    """Yield the tokens of a job; raise ``ApiError`` if no more come."""
    finish = None
    while finish is None:
        event = await job.events.get()
        if isinstance(event, JobFailed):
            status, code = event.trouble.value
            retry_s = RETRY_S if event.trouble is Trouble.FULL else None
            raise ApiError(status, event.message, code=code, retry_after_s=retry_s)
        yield event
        finish = event.finish


async def _stream(
    request: web.Request, writer: AnswerWriter, pieces: AsyncGenerator[Produced]
) -> web.StreamResponse:
    first = await anext(pieces)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        await response.write(writer.events(first))
        async for piece in pieces:
            await response.write(writer.events(piece))
        await response.write(END)
    except ApiError as error:
        # The status is sent already, so the error is the stream's last event.
        await response.write(error.event())
    await response.write_eof()
    return response


class AnswerWriter:
    """Writes a job's answer; its tokens come in order, each once."""

    def __init__(self, job: ServeJob, model: str) -> None:
        self._job = job
        self._object = "chat.completion" if job.is_chat else "text_completion"
        now = int(time.time())
        self._head: Document = {"id": job.request.id, "created": now, "model": model}
        self._num_tokens = job.request.answered

    def whole(self, pieces: Sequence[Produced]) -> Document:
        """Return the whole answer."""
        self._num_tokens += len(pieces)
        text = "".join(piece.text for piece in pieces)
        message = {"message": {"role": "assistant", "content": text}}
        choice = self._choice(message if self._job.is_chat else {"text": text}, pieces)
        answer = self._head | {"object": self._object, "choices": [choice]}
        return answer | {"usage": self._usage()} | self._report()

    def events(self, piece: Produced) -> bytes:
        """Return what a piece adds to a stream; empty if there is nothing to show yet."""
        job, text, documents = self._job, piece.text, []
        if job.is_chat and self._num_tokens == 0:
            delta = {"delta": {"role": "assistant", "content": ""}}
            documents.append(self._chunk([{"index": 0, "finish_reason": None} | delta]))
        self._num_tokens += 1
        if text or piece.finish or job.wants_token_ids:
            delta = {"delta": {"content": text} if text else {}}
            choice = self._choice(delta if job.is_chat else {"text": text}, [piece])
            documents.append(self._chunk([choice]))
        if piece.finish:
            if job.wants_usage:
                documents.append(self._chunk([]) | {"usage": self._usage()})
            documents[-1] |= self._report()
        return b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in documents)

    def _chunk(self, choices: list[Document]) -> Document:
        name = f"{self._object}.chunk" if self._job.is_chat else self._object
        usage = {"usage": None} if self._job.wants_usage else {}
        return self._head | {"object": name, "choices": choices} | usage

    def _choice(self, content: Document, pieces: Sequence[Produced]) -> Document:
        choice: Document = {"index": 0, "finish_reason": pieces[-1].finish, "logprobs": None}
        choice |= content
        if self._job.wants_token_ids:
            choice["token_ids"] = [piece.sample.token for piece in pieces]
        return choice

    def _usage(self) -> Document:
        num_prompt = self._job.request.num_asked
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self._job.cached, num_prompt)},
        }

    def _report(self) -> Document:
        return {"kvferry": self._job.report} if self._job.report else {}
