"""Error responses of workers and the router, in the form that OpenAI clients read.

Both use one form, so the router can pass a worker's error on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from kvferry.errors import KvferryError

JSON = "application/json"
# Of a body, from its first byte to its last.
BODY_S = 30.0
CLIENT_LEFT = 499

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Content of an error document. ``type`` says whether the client or the server is at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ApiError(KvferryError):
    """An error response. ``document`` replaces the body if another server has written it.

    ``retry_after_s`` tells the client when to ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        document: bytes = b"",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)
        self._document = document

    @property
    def document(self) -> bytes:
        """The error document as JSON."""
        return self._document or msgspec.json.encode({"error": self.body})

    def response(self) -> web.Response:
        """Return the HTTP response."""
        return web.Response(
            body=self.document, status=self.status, content_type=JSON, headers=self._headers
        )

    def event(self) -> bytes:
        """Return the error as an event, for a stream that has begun."""
        return b"data: " + self.document + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that the client must change."""
    return ApiError(400, message, param=param, code=code)


async def respond(
    request: web.Request, handler: Handler, server_log: logging.Logger
) -> web.StreamResponse:
    """Return the response of the handler, or of its exception, which goes into the server's log."""
    try:
        return await handler(request)
    except ApiError as error:
        level = logging.INFO if error.status < 500 else logging.WARNING
        server_log.log(
            level, "refused path=%s status=%d reason=%r", request.path, error.status, str(error)
        )
        return error.response()
    except web.HTTPException as error:
        return from_http_exception(error, request.client_max_size).response()
    except (ConnectionError, web.RequestPayloadError) as error:
        # The client has left in the middle, and nobody reads this.
        server_log.info("client-left path=%s reason=%r", request.path, error)
        return web.Response(status=CLIENT_LEFT)
    except Exception:
        server_log.exception("request-failed path=%s", request.path)
        return ApiError(500, "this server has a bug; see its log", code="internal").response()


async def read_body(request: web.Request) -> bytes:
    """Return a request's body. Raises ``ApiError`` if it does not come in time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        message = f"the request body took longer than {BODY_S:g} s; send it again"
        raise ApiError(408, message, code="slow") from None


def from_http_exception(error: web.HTTPException, most_bytes: int) -> ApiError:
    """Return the error for an exception that aiohttp raises itself."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            message = f"a body may have at most {most_bytes} bytes; shorten the prompt"
            return ApiError(413, message, code="too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, f"this path takes {allowed}", code="method_not_allowed")
        case web.HTTPNotFound():
            message = "there is no such path; see docs/serving.md"
            return ApiError(404, message, code="not_found")
        case _:
            return ApiError(error.status, error.reason, code="bad_request")


def parse_error(document: bytes) -> tuple[str, str]:
    """Return code and message of an error document; empty strings if it is not one."""
    try:
        error = msgspec.json.decode(document, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or ""), str(error.get("message") or "")


def json_response(content: object, status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type=JSON)
