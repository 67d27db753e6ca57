"""Endpoints for tests: a small web server in a thread with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENCE_S = 30.0


@contextlib.contextmanager
def served(post: Handler, models: Handler | None = None) -> Iterator[str]:
    """Yield the address of an endpoint that answers every POST with the handler."""
    here = asyncio.new_event_loop()
    thread = threading.Thread(target=here.run_forever, name="endpoint", daemon=True)
    thread.start()

    def run(step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, here).result(PATIENCE_S)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await post(request)

    app = web.Application()
    app.router.add_get("/v1/models", models or one_model)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    try:
        run(runner.setup())
        run(web.TCPSite(runner, "127.0.0.1", 0).start())
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        run(runner.cleanup())
        run(cancel_others())
        here.call_soon_threadsafe(here.stop)
        thread.join(PATIENCE_S)
        here.close()


async def cancel_others() -> None:
    """End what still runs, such as the acceptance of a connection that came at the end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


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
