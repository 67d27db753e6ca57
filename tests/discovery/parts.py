"""Records and plain HTTP requests for the tests of the discovery service."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvferry.discovery.http.messages import Registration
from kvferry.discovery.records import RankRecord
from kvferry.layout import Layout, Parallel, attention
from kvferry.security.keys import ClusterKey
from kvferry.security.signing import Introduction, new_nonce, sign

ENOUGH_S = 30.0
SPEC = attention(layers=4, kv_heads=4, head_dim=8)


def layout(tp: int = 1, page_tokens: int = 16) -> Layout:
    return Layout(SPEC, Parallel(tp=tp), page_tokens=page_tokens)


def record(name: str = "p", rank: int = 0, incarnation: int = 1, **changes: Any) -> RankRecord:
    """Return a record of an instance with two ranks, with some fields changed."""
    fields: dict[str, Any] = {
        "instance": name,
        "rank": rank,
        "incarnation": incarnation,
        "fingerprint": "model",
        "layout": layout(tp=2),
        "transport": "shm",
        "control": f"tcp://127.0.0.1:{5000 + rank}",
    }
    return RankRecord(**(fields | changes))


def registration(one: RankRecord, lease_s: float = 10.0) -> bytes:
    return msgspec.json.encode(Registration(one, lease_s))


class Answer:
    """Status and body of a response."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Error code. Checks that the document has exactly a code and a message."""
        document = self.json
        assert set(document) == {"error"}
        assert set(document["error"]) == {"code", "message"}
        assert "Traceback" not in document["error"]["message"]
        return str(document["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


def life_of(url: str) -> str:
    """Return the service's current life."""
    answer = ask(url, "GET", f"/healthz?nonce={new_nonce()}")
    return msgspec.json.decode(answer.body, type=Introduction).life


def signed(url: str, key: ClusterKey, method: str, path: str, body: bytes = b"") -> str:
    """Return the authorization header of a request."""
    return sign(key.http, life_of(url), method, path, body, time.time())


def ask(
    url: str,
    method: str,
    path: str,
    body: bytes = b"",
    key: ClusterKey | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request and return the response."""
    parts = urlsplit(url)
    sent = dict(headers or {})
    if key is not None:
        sent.setdefault("Authorization", signed(url, key, method, path, body))
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ENOUGH_S)
    try:
        connection.request(method, path, body or None, sent)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], limit_s: float = ENOUGH_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)
