"""Error documents of workers and the router."""

from __future__ import annotations

import pytest
from aiohttp import web

from kvferry.http.api_errors import ApiError, from_http_exception, invalid, parse_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (504, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    error = ApiError(status, "a sentence", code="a_code")
    assert error.body.type == kind
    assert parse_error(error.document) == ("a_code", "a sentence")
    assert error.response().status == status


def test_another_servers_error_passes_unchanged() -> None:
    theirs = invalid("the prompt is empty", "prompt").document
    ours = ApiError(400, "the prompt is empty", document=theirs)
    assert ours.document == theirs
    assert ours.event() == b"data: " + theirs + b"\n\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (web.HTTPRequestEntityTooLarge(9, 10), "too_large", "a body may have at most 8 bytes"),
        (web.HTTPMethodNotAllowed("PUT", {"POST", "GET"}), "method_not_allowed", "GET, POST"),
        (web.HTTPNotFound(), "not_found", "there is no such path"),
        (web.HTTPBadRequest(reason="Bad header"), "bad_request", "Bad header"),
    ],
)
def test_aiohttps_exceptions_have_the_same_form(
    error: web.HTTPException, code: str, message: str
) -> None:
    refusal = from_http_exception(error, most_bytes=8)
    assert (refusal.status, refusal.body.code) == (error.status, code)
    assert message in str(refusal)


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b'{"error": 1}', b"\xff"])
def test_parse_error_ignores_other_documents(document: bytes) -> None:
    assert parse_error(document) == ("", "")
