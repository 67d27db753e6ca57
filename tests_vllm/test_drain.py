"""Ending a server under load with SIGTERM and vLLM's ``--shutdown-timeout``.

The engine answers what it has accepted, and holds the blocks of finished prompts until decode has
them, before its endpoints end. The router sends what it rejects to another server.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests_vllm.models import plain
from tests_vllm.servers import (
    CACHE_BYTES,
    Deployment,
    Json,
    Server,
    complete,
    log,
    metric,
    stream,
    timed,
    token_ids,
)
from tests_vllm.waiting import eventually, is_idle

ANSWER = 12
# Tokens of a stream that is still going on when the load has begun and the signal is handled.
LONG = 120
# An engine that computes tokens of several prompts at once on a busy machine takes a minute.
DRAIN_S = 180
# Long enough for the engine to compute for seconds.
TOKENS = 1500
ROOMS_DONE = "vllm:kvferry_rooms_done_total"


class Engines(NamedTuple):
    """Two prefills and two decodes, of which the first ones will be ended, and a router."""

    first: Server
    last: Server
    decode: Server
    other: Server
    router: Server


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Deployment() as deployment, timed("two prefills, two decodes and a router"):
        servers = [
            deployment.vllm(
                *(name, plain()),
                transfer=deployment.connector(role, name),
                cache_bytes=3 * CACHE_BYTES,
                more=f"--no-enable-prefix-caching --shutdown-timeout {DRAIN_S}",
            )
            for name, role in (
                ("first", "kv_producer"),
                ("last", "kv_producer"),
                ("decode", "kv_consumer"),
                ("other", "kv_consumer"),
            )
        ]
        for server in servers:
            server.wait_until_up()
        router = deployment.router(servers[:2], *servers[2:])
        log("all are up")
        yield Engines._make([*servers, router])


def prompt_of(number: int, num_tokens: int = TOKENS) -> list[int]:
    return [1000 + number, *((11 * i + number) % 997 + 500 for i in range(num_tokens))]


def prefilled(server: Server, prompts: list[list[int]]) -> list[Json]:
    """Return what prefill answers to prompts at once."""
    given = {"do_remote_decode": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = pool.map(lambda ids: complete(server, ids, 1, kv_transfer_params=given), prompts)
        return [dict(answer["kv_transfer_params"]) for answer in asked]


def answered(
    server: Server, prompts: list[list[int]], num_tokens: int, params: list[Json] | None = None
) -> list[list[int]]:
    """Return the answers to prompts at once, of which the cache may come from rooms."""
    given = params or [{} for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = pool.map(
            lambda ids, own: complete(server, ids, num_tokens, kv_transfer_params=own),
            *(prompts, given),
        )
        return list(map(token_ids, asked))


# ---------------------------------------------------------------- requests to the engines


def test_prefill_ends_after_its_prompts_were_carried(engines: Engines) -> None:
    """The terminated prefill computes prompts and holds others; all are carried to decode."""
    prompts = [prompt_of(number) for number in range(3)]
    params = prefilled(engines.first, prompts)
    load = Load(engines)
    with timed("a prefill with open rooms is terminated"), load.running(engines.first):
        load.terminate(engines.first)
        load.wait_for_more_answers()
        assert not has_ended(engines.first)
        answers = answered(engines.decode, prompts, ANSWER, params)
        engines.first.process.wait(DRAIN_S)
    load.check()
    assert answers == answered(engines.last, prompts, ANSWER)
    eventually(lambda: is_idle(engines.last), "blocks are released")


def test_decode_ends_after_it_has_answered(engines: Engines) -> None:
    """The terminated decode goes on with streams that have begun."""
    prompts = [prompt_of(30 + number) for number in range(3)]
    params = prefilled(engines.last, prompts)
    load = Load(engines)
    with timed("a decode that answers is terminated"), load.running(engines.decode):
        begun = [
            Begun(engines.decode, prompt, own) for prompt, own in zip(prompts, params, strict=True)
        ]
        load.terminate(engines.decode)
        answers = [one.rest() for one in begun]
        engines.decode.process.wait(DRAIN_S)
    load.check()
    assert answers == answered(engines.last, prompts, LONG)
    eventually(lambda: is_idle(engines.last), "blocks are released")


class Begun:
    """A stream of which the first event has come."""

    def __init__(self, server: Server, prompt: list[int], params: Json) -> None:
        body: Json = {"model": "m", "prompt": prompt, "max_tokens": LONG, "temperature": 0}
        body |= {"stream": True, "return_token_ids": True, "kv_transfer_params": params}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self._response = urllib.request.urlopen(request)
        self._first = self._response.readline()

    def rest(self) -> list[int]:
        """Return the ids of the whole answer."""
        with self._response as response:
            lines = [self._first, *response.readlines()]
        events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
        return [token for event in events for token in token_ids(json.loads(event))]


def has_ended(server: Server) -> bool:
    return server.process.poll() is not None


# ---------------------------------------------------------------- requests to the router


def text_of(chunks: list[Json]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [c["text"] if "text" in c else c["delta"].get("content") for c in choices]
    return "".join(text or "" for text in texts)


CHAT = [{"role": "user", "content": "Name three rivers in Asia."}]
# Each client repeats one of these requests.
REQUESTS: tuple[Callable[[Server], object], ...] = (
    lambda server: token_ids(complete(server, prompt_of(50, 400), ANSWER)),
    lambda server: token_ids(complete(server, "A ferry is a boat that", ANSWER)),
    lambda server: text_of(stream(server, prompt="A bridge is")),
    lambda server: text_of(stream(server, prompt=prompt_of(51, 400))),
    lambda server: text_of(stream(server, "chat/completions", messages=CHAT)),
)


class Answer(NamedTuple):
    """An answer of the load: when it was asked for and complete, and why it is wrong."""

    began: float
    ended: float
    failure: str | None


class Load:
    """Clients that send one request after another to the router."""

    def __init__(self, engines: Engines) -> None:
        self._router = engines.router
        self._wanted = [ask(engines.last) for ask in REQUESTS]
        self._answers: list[Answer] = []
        self._terminated = 0.0
        self._stopped = threading.Event()

    @contextmanager
    def running(self, server: Server) -> Iterator[None]:
        """Send requests, so that the server transfers some, until it has ended and beyond."""
        done = metric(server, ROOMS_DONE)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            clients = [pool.submit(self._send, place) for place in range(len(REQUESTS))]
            try:
                eventually(
                    lambda: metric(server, ROOMS_DONE) >= done + len(REQUESTS), "the load runs"
                )
                yield
                self.wait_for_more_answers()
            finally:
                self._stopped.set()
            for client in clients:
                client.result()

    def _send(self, place: int) -> None:
        while not self._stopped.is_set():
            began, failure = time.monotonic(), None
            try:
                found = REQUESTS[place](self._router)
                if found != self._wanted[place]:
                    failure = f"{found} instead of {self._wanted[place]}"
            except Exception as error:
                failure = repr(error)
            self._answers.append(Answer(began, time.monotonic(), failure))

    def terminate(self, server: Server) -> None:
        """Terminate a server."""
        server.process.terminate()
        self._terminated = time.monotonic()

    def wait_for_more_answers(self) -> None:
        """Wait until each client has had two more answers or so."""
        enough = len(self._answers) + 2 * len(REQUESTS)
        eventually(lambda: len(self._answers) >= enough, "the other server answers")

    def check(self) -> None:
        """Check that no request has failed, and that some were open at the signal."""
        assert [answer.failure for answer in self._answers if answer.failure] == []
        assert any(each.began < self._terminated < each.ended for each in self._answers)
        log(f"{len(self._answers)} requests through the router were answered")
