"""Parsing of client requests."""

from __future__ import annotations

import json

import pytest

from kvferry.http.api_errors import ApiError
from kvferry.router.adapters import KvferryAdapter
from kvferry.router.bodies import RequestDefaults, parse_call
from kvferry.router.options import OnFailure


def read(body: object, header: str | None = None) -> dict[str, object]:
    defaults = RequestDefaults(lambda model: model or "m", OnFailure.LOCAL, 5)
    call = parse_call("/v1/completions", json.dumps(body).encode(), header, defaults)
    sent: dict[str, object] = json.loads(KvferryAdapter().for_decode(call, 1, "p", 2.0))
    return sent | {"on_failure": call.on_failure}


def test_a_body_may_override_the_header() -> None:
    assert read({}, "retry")["on_failure"] is OnFailure.RETRY
    body = {"kvferry": {"on_failure": "fail"}}
    assert read(body, "retry")["on_failure"] is OnFailure.FAIL
    assert read({"kvferry": {}}, "retry")["on_failure"] is OnFailure.RETRY
    with pytest.raises(ApiError, match="on_failure must be"):
        read({}, "maybe")


def test_unknown_fields_are_kept() -> None:
    body = {"prompt": [1, 2], "anything": {"a": [None, 1.5]}, "seed": None}
    sent = read(body)
    assert sent["anything"] == body["anything"]
    assert sent["prompt"] == [1, 2]
    assert sent["seed"] == 5
