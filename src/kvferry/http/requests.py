"""A request's id: its caller's, or one of ours. The answer has it, and so has the log."""

from __future__ import annotations

from aiohttp import web

from kvferry.http.connections import Handler
from kvferry.telemetry.logs.context import (
    REQUEST_HEADER,
    TRACE_HEADER,
    about,
    checked_trace,
    named,
    request_id,
)


def identify(app: web.Application) -> None:
    """Have an application's requests identified, before anything else is done with them."""
    app.middlewares.insert(0, _identified)
    app.on_response_prepare.append(_name)


@web.middleware
async def _identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    headers = request.headers
    trace = checked_trace(headers.get(TRACE_HEADER))
    with about(request_id(headers.get(REQUEST_HEADER)), trace):
        response = await handler(request)
        if not response.prepared:
            # It will be, when this block is over.
            response.headers.update(named())
        return response


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    """A stream begins while its handler runs."""
    response.headers.update(named())
