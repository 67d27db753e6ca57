"""Endpoints for tests: a small web server in a thread with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web
from sites import serve_app

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.contextmanager
def served(post: Handler, models: Handler | None = None) -> Iterator[str]:
    """Yield the address of an endpoint that answers every POST with the handler."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await post(request)

    app = web.Application()
    app.router.add_get("/v1/models", models or one_model)
    app.router.add_post("/{path:.*}", answer)
    with serve_app(app) as url:
        yield url


async def one_model(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}, {"id": "other"}]})


def refusal(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message, "code": None}}, status=status)


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def streaming(*portions: bytes, pause_s: float = 0.0) -> Handler:
    """Return a handler that sends each of these byte strings in its own packet."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *portions, pause_s=pause_s)

    return handler


async def stream(
    request: web.Request, *portions: bytes, pause_s: float = 0.0
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for portion in portions:
        await response.write(portion)
        await asyncio.sleep(pause_s)
    await response.write_eof()
    return response


def counted_stream(prompt_tokens: int, output_tokens: int) -> list[bytes]:
    """Return a streamed completion with token counts."""
    pieces = [event({"choices": [{"text": "a"}]}) for _ in range(output_tokens)]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    last = {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
    return [*pieces, event(last), b"data: [DONE]\n\n"]
