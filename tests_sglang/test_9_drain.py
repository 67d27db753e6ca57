"""SIGTERM at a server under load: its open requests finish before its endpoints end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import CHUNK, running
from pairs import NUM_TOKENS, generate
from prompts import LONG, MANY
from reference import Reference
from servers import Server, Side, is_up, stop_all
from test_4_aborts_and_deaths import is_idle, wait_until

# Requests at a time, over both prefill servers.
NUM_CLIENTS = 6
# SGLang looks for the signal and for open requests every 5 s.
EXIT_S = 120.0


class DrainServers(NamedTuple):
    """Two prefill servers, and two decode servers."""

    first: Server
    second: Server
    decode: Server
    other_decode: Server


@dataclass(frozen=True)
class Result:
    """One request of the load: its servers, when it was sent and answered, and its failure."""

    prefill: Server
    decode: Server
    began: float
    ended: float
    failure: str | None


class Load:
    """Clients that send one request after another to the servers that a router would use."""

    def __init__(self, prefills: list[Server], decodes: list[Server], reference: Reference) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.results: list[Result] = []
        self._prompts = [reference.ids(f"{text}. {LONG}") for text in MANY[:NUM_CLIENTS]]
        self._expected = [reference.answer(prompt, NUM_TOKENS) for prompt in self._prompts]
        self._stopped = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Send requests until the block ends, and wait for the last ones."""
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._send_requests, client) for client in range(NUM_CLIENTS)]
            try:
                yield self
            finally:
                self._stopped.set()
            for client in clients:
                client.result()

    def _send_requests(self, client: int) -> None:
        turn = client
        while not self._stopped.is_set():
            prefills, decodes = self.prefills, self.decodes
            prefill, decode = prefills[turn % len(prefills)], decodes[turn % len(decodes)]
            turn += 1
            self.results.append(self._send(client, prefill, decode))

    def _send(self, client: int, prefill: Server, decode: Server) -> Result:
        began = time.monotonic()
        answers = generate(self._prompts[client], prefill, decode)
        failure = None
        if "error" in answers.decode or "error" in answers.prefill:
            failure = f"{answers.decode} {answers.prefill}"
        elif answers.ids != self._expected[client]:
            failure = f"{answers.ids} instead of {self._expected[client]}"
        return Result(prefill, decode, began, time.monotonic(), failure)

    def num_answered(self) -> int:
        return len(self.results)

    def remove(self, server: Server) -> None:
        """Send no more requests to a server."""
        self.prefills = [other for other in self.prefills if other is not server]
        self.decodes = [other for other in self.decodes if other is not server]


@pytest.fixture(scope="module")
def drain(model: Path, folder: Path, reference: Reference) -> Iterator[DrainServers]:
    stop_all()
    sides = (
        Side(role="prefill", tp=2, page=16, flags=CHUNK),
        Side(role="prefill", flags=CHUNK),
        Side(role="decode", page=16),
        Side(role="decode"),
    )
    for started in running(sides, model, folder):
        yield DrainServers(*started)


def terminate(server: Server, load: Load) -> float:
    """Terminate a server under load, as a router sees it, and return when the signal was sent."""
    target = load.num_answered() + 2 * NUM_CLIENTS
    wait_until(lambda: load.num_answered() >= target, "the load did not start")
    sent = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_up(f"{server.url}/health"), "the server still reports that it is up")
    load.remove(server)
    server.process.wait(EXIT_S)
    target = load.num_answered() + 2 * NUM_CLIENTS
    wait_until(lambda: load.num_answered() >= target, "the other server does not answer")
    return sent


def check_drained(server: Server, load: Load, answered: list[Result]) -> None:
    """Check that all requests succeeded, some of them during the drain, and the end was clean."""
    assert [result.failure for result in load.results if result.failure] == []
    assert answered
    assert server.process.returncode == 0
    assert server.log_text().count("free=True") == server.side.tp
    assert "before they released" not in server.log_text()


def test_a_terminated_prefill_server_finishes_its_requests(
    drain: DrainServers, reference: Reference
) -> None:
    load = Load([drain.first, drain.second], [drain.decode], reference)
    with load.running():
        sent = terminate(drain.first, load)
    answered = [r for r in load.results if r.prefill is drain.first and r.began < sent < r.ended]
    check_drained(drain.first, load, answered)
    wait_until(lambda: is_idle(drain.decode), "decode still has requests")


def test_a_terminated_decode_server_finishes_its_requests(
    drain: DrainServers, reference: Reference
) -> None:
    load = Load([drain.second], [drain.decode, drain.other_decode], reference)
    with load.running():
        sent = terminate(drain.decode, load)
    answered = [r for r in load.results if r.decode is drain.decode and r.began < sent < r.ended]
    check_drained(drain.decode, load, answered)
    wait_until(lambda: is_idle(drain.second), "prefill still has requests")
