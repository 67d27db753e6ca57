"""Answers of servers that fail a request in the middle of its stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_engines.client import Json, RequestFailed
from gpu_engines.servers import Server, Servers, Spec
from gpu_engines.sglang_servers import alone

from kvferry.testing.ports import later_port

# Answers GET with nothing and POST with the events of a file.
SERVER = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
        self.wfile.write(pathlib.Path(sys.argv[2]).read_bytes())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
Answering = Callable[[list[Json]], Server]


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """Return how to start a server that streams some events."""
    with Servers(tmp_path / "logs") as servers:

        def start(events: list[Json]) -> Server:
            file, port = tmp_path / "events", later_port()
            file.write_text("".join(f"data: {json.dumps(event)}\n\n" for event in events))
            command = [sys.executable, "-c", SERVER, str(port), str(file)]
            servers.start([Spec("decode", command, port, {})])
            servers.wait(30.0)
            return servers["decode"]

        yield start


def event(tokens: list[int], reason: Json | None) -> Json:
    return {"output_ids": tokens, "meta_info": {"finish_reason": reason}}


def test_a_finished_stream_is_an_answer(answering: Answering) -> None:
    server = answering([event([7], None), event([7, 8], {"type": "length", "length": 2})])
    assert alone(server, [3, 4], 2).tokens == [7, 8]


def test_an_aborted_stream_is_no_answer(answering: Answering) -> None:
    reason = {"type": "abort", "message": "peer-gone: lost p", "status_code": 500}
    server = answering([event([7], None), event([7], reason)])
    with pytest.raises(RequestFailed, match="decode answered 500: peer-gone: lost p"):
        alone(server, [3, 4], 2)
