"""Errors as OpenAI's clients read them: a status, and a document with a message and a code."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry.errors import KvferryError
from kvferry.serve.jobs import Failed, Trouble


class ErrorType(StrEnum):
    """Whose fault it is: the caller's or ours."""

    INVALID = "invalid_request_error"
    SERVER = "server_error"


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is inside an error document."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorDocument(msgspec.Struct, frozen=True):
    """Every error of the API."""

    error: ErrorBody


class ApiError(KvferryError):
    """What a caller is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = ErrorType.INVALID,  # noqa: A002 - OpenAI's word
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=message, type=type, param=param, code=code)

    @property
    def document(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(ErrorDocument(self.body))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller has to change something."""
    return ApiError(400, message, param=param, code=code)


_STATUS = {
    Trouble.INVALID: (400, None),
    Trouble.TRANSFER: (503, "kv_transfer_failed"),
    Trouble.TIMEOUT: (504, "timeout"),
    Trouble.ENDED: (503, "worker_ended"),
}


def of_failure(failed: Failed) -> ApiError:
    """What the caller of a job that failed is told."""
    status, code = _STATUS[failed.trouble]
    kind = ErrorType.INVALID if failed.trouble is Trouble.INVALID else ErrorType.SERVER
    return ApiError(status, failed.message, type=kind, code=code)
