"""Disconnected clients and killed servers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from conftest import Cast
from pairs import NUM_TOKENS, ask, body, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, post

# What the servers are started with, and some time for a busy machine.
DEADLINE_S = 60.0 + 20.0


def until(happens: Any, why: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happens():
        assert time.monotonic() < end, why
        time.sleep(0.1)


def is_idle(server: Server) -> bool:
    """SGLang flushes its cache only where no request is anywhere in it."""
    return "error" not in post(f"{server.url}/flush_cache", {})


def works(cast: Cast, reference: Reference) -> bool:
    prompt = reference.ids(SHORT)
    return ask(prompt, cast.one, cast.decode).ids == reference.answer(prompt, NUM_TOKENS)


def test_a_disconnected_client_frees_its_room(cast: Cast, reference: Reference) -> None:
    """Nobody computes the prompt, so decode waits; then the client closes its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", cast.decode.port, timeout=DEADLINE_S)
    asked = body(reference.ids(LONG), cast.one, new_room(), stream=True)
    connection.request("POST", "/generate", json.dumps(asked), {"Content-Type": "application/json"})
    until(lambda: not is_idle(cast.decode), "decode never had the request")
    connection.close()
    until(lambda: is_idle(cast.decode), "decode still has a request that nobody waits for")
    assert works(cast, reference)


def test_an_abort_ends_both_sides(cast: Cast, reference: Reference) -> None:
    """Prefill waits for decode pages that never come, until it is told to give up."""
    asked = body(reference.ids(LONG), cast.one, new_room(), rid="given-up")
    said: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: said.append(post(f"{cast.one.url}/generate", asked)))
    thread.start()
    until(lambda: not is_idle(cast.one), "prefill never had the request")
    post(f"{cast.one.url}/abort_request", {"rid": "given-up"})
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    until(lambda: is_idle(cast.one), "prefill still has the request")
    assert works(cast, reference)


def test_a_killed_prefill_fails_only_its_requests(cast: Cast, reference: Reference) -> None:
    prompt = reference.ids(" ".join([LONG] * 6))
    said: list[dict[str, Any]] = []
    asked = body(prompt, cast.three, new_room())
    computed = cast.three.log.read_text(errors="replace").count("Prefill batch")
    at_prefill = threading.Thread(target=post, args=(f"{cast.three.url}/generate", asked))
    at_decode = threading.Thread(
        target=lambda: said.append(post(f"{cast.decode.url}/generate", asked))
    )
    at_prefill.start()
    at_decode.start()
    log = cast.three.log
    until(
        lambda: log.read_text(errors="replace").count("Prefill batch") >= computed + 2,
        "prefill never began",
    )
    killed = time.monotonic()
    cast.three.kill()
    at_decode.join(DEADLINE_S)
    took_s = time.monotonic() - killed
    assert not at_decode.is_alive()
    assert "error" in said[0], said
    print(f"\ndecode gave its request up {took_s:.1f} s after prefill was killed: {said[0]}")
    assert took_s < DEADLINE_S
    at_prefill.join(DEADLINE_S)
    assert works(cast, reference)
    until(lambda: is_idle(cast.decode), "decode still holds the pages of the failed request")
