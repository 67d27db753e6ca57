"""API errors: what a client is told instead of an answer, in the form that OpenAI's clients read.

Workers and the router have them in common, so a router can pass a worker's error on.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from kvferry.errors import KvferryError

JSON = "application/json"


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is inside an error document. ``type`` says whose fault it is: the client's or ours."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorDocument(msgspec.Struct, frozen=True):
    """Every error of the API."""

    error: ErrorBody


class ApiError(KvferryError):
    """A status and a sentence; ``document`` where another server has written it already."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        document: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)
        self._document = document

    @property
    def document(self) -> bytes:
        """As JSON."""
        return self._document or msgspec.json.encode(ErrorDocument(self.body))

    def response(self) -> web.Response:
        """The whole HTTP answer."""
        return web.Response(body=self.document, status=self.status, content_type=JSON)

    def event(self) -> bytes:
        """The same inside a stream that has begun."""
        return b"data: " + self.document + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client has to change something."""
    return ApiError(400, message, param=param, code=code)


def of_refusal(error: web.HTTPException, most_bytes: int) -> ApiError:
    """What aiohttp itself refuses."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            message = f"a body may have {most_bytes} bytes; shorten the prompt"
            return ApiError(413, message, code="too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(405, f"this path takes {allowed}", code="method_not_allowed")
        case web.HTTPNotFound():
            message = "there is no such path; see docs/serving.md"
            return ApiError(404, message, code="not_found")
        case _:
            return ApiError(error.status, error.reason, code="bad_request")


def told(document: bytes) -> tuple[str, str]:
    """Code and message of an error document; empty where it is none."""
    try:
        error = msgspec.json.decode(document, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or ""), str(error.get("message") or "")


def json_response(content: object, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type=JSON)
