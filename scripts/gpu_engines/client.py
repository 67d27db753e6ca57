"""Requests to servers: JSON, streams with the time of their first token, metrics."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpu_engines.servers import Server

ANSWER_S = 60.0
Json = dict[str, Any]


class RequestFailed(Exception):
    """A server answered with an error."""

    def __init__(self, server: Server, status: int, text: str) -> None:
        super().__init__(f"{server.name} answered {status}: {text[:300]}")
        self.server = server.name
        self.status = status


class Chunk(NamedTuple):
    """One event of a stream, and when it came (``time.perf_counter``)."""

    at_s: float
    document: Json


@contextmanager
def _sent(
    server: Server, path: str, body: Json | None, timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")
            raise RequestFailed(server, response.status, text)
        yield response
    finally:
        connection.close()


def post(server: Server, path: str, body: Json, timeout_s: float = ANSWER_S) -> Json:
    """Return the JSON answer, or the text under "text"."""
    with _sent(server, path, body, timeout_s) as response:
        text = response.read().decode()
    return dict(json.loads(text)) if text.startswith("{") else {"text": text}


def get(server: Server, path: str) -> Json:
    """Return the JSON answer of a GET."""
    with _sent(server, path, None, ANSWER_S) as response:
        return dict(json.load(response))


def stream(server: Server, path: str, body: Json) -> Iterator[Chunk]:
    """Yield the server-sent events of an answer.

    Raises ``RequestFailed`` for an event with an error. Its status is the error's code, because the
    response has begun with status 200.
    """
    with _sent(server, path, body | {"stream": True}, ANSWER_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                document = dict(json.loads(line[6:]))
                if "error" in document:
                    error = document["error"]
                    raise RequestFailed(server, int(error.get("code") or 200), json.dumps(error))
                yield Chunk(time.perf_counter(), document)


def leave_early(server: Server, path: str, body: Json) -> http.client.HTTPConnection:
    """Send a request and return its connection; closing it aborts the request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric's series; 0 if there is none."""
    with _sent(server, "/metrics", None, ANSWER_S) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in found)
