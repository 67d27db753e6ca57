"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from kvferry.errors import KvferryError

JSON = "application/json"


class ApiError(KvferryError):
    """What a client is told instead of an answer; ``document`` where a worker has written it."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        document: bytes = b"",
    ) -> None:
        self.status, self.code, self.param = status, code, param
        self._document = document
        super().__init__(message)

    @property
    def document(self) -> bytes:
        """As it is sent."""
        if self._document:
            return self._document
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        """The whole HTTP answer."""
        return web.Response(body=self.document, status=self.status, content_type=JSON)

    def event(self) -> bytes:
        """The same inside a stream that has begun."""
        return b"data: " + self.document + b"\n\n"


def json_response(content: object, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=msgspec.json.encode(content), status=status, content_type=JSON)


def told(document: bytes) -> tuple[str, str]:
    """Code and message of an error document; empty where it is none."""
    try:
        error = msgspec.json.decode(document, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", ""
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or ""), str(error.get("message") or "")
