"""Disconnected clients and killed servers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from conftest import Servers
from pairs import NUM_TOKENS, body, generate, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, post

# The servers' timeout, and some time for a busy machine.
DEADLINE_S = 60.0 + 20.0


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.1)


def is_idle(server: Server) -> bool:
    """Return whether a server has no requests; only then SGLang flushes its cache."""
    return "error" not in post(f"{server.url}/flush_cache", {})


def can_generate(servers: Servers, reference: Reference) -> bool:
    """Return whether the next request gets the right answer."""
    prompt = reference.ids(SHORT)
    answers = generate(prompt, servers.prefill_tp1, servers.decode)
    return answers.ids == reference.answer(prompt, NUM_TOKENS)


def test_a_disconnected_client_frees_its_room(servers: Servers, reference: Reference) -> None:
    """Decode waits because no prefill gets the request; then the client disconnects."""
    connection = http.client.HTTPConnection("127.0.0.1", servers.decode.port, timeout=DEADLINE_S)
    request = body(reference.ids(LONG), servers.prefill_tp1, new_room(), stream=True)
    connection.request(
        "POST", "/generate", json.dumps(request), {"Content-Type": "application/json"}
    )
    wait_until(lambda: not is_idle(servers.decode), "decode did not get the request")
    connection.close()
    wait_until(
        lambda: is_idle(servers.decode),
        "decode still has the request of the client that disconnected",
    )
    assert can_generate(servers, reference)


def test_an_abort_ends_both_sides(servers: Servers, reference: Reference) -> None:
    """Prefill waits because no decode server offers pages; then it gets an abort."""
    request = body(reference.ids(LONG), servers.prefill_tp1, new_room(), rid="aborted")
    url = f"{servers.prefill_tp1.url}/generate"
    thread = threading.Thread(target=post, args=(url, request))
    thread.start()
    wait_until(lambda: not is_idle(servers.prefill_tp1), "prefill did not get the request")
    post(f"{servers.prefill_tp1.url}/abort_request", {"rid": "aborted"})
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    wait_until(lambda: is_idle(servers.prefill_tp1), "prefill still has the request")
    assert can_generate(servers, reference)


def test_a_killed_prefill_fails_only_its_requests(servers: Servers, reference: Reference) -> None:
    prompt = reference.ids(" ".join([LONG] * 6))
    responses: list[dict[str, Any]] = []
    request = body(prompt, servers.prefill_tp3, new_room())
    log = servers.prefill_tp3.log_text
    num_before = log().count("Prefill batch")
    at_prefill = threading.Thread(
        target=post, args=(f"{servers.prefill_tp3.url}/generate", request)
    )
    at_decode = threading.Thread(
        target=lambda: responses.append(post(f"{servers.decode.url}/generate", request))
    )
    at_prefill.start()
    at_decode.start()
    wait_until(lambda: log().count("Prefill batch") >= num_before + 2, "prefill did not start")
    killed = time.monotonic()
    servers.prefill_tp3.kill()
    at_decode.join(DEADLINE_S)
    took_s = time.monotonic() - killed
    assert not at_decode.is_alive()
    assert "error" in responses[0], responses
    print(f"\ndecode failed its request {took_s:.1f} s after prefill was killed: {responses[0]}")
    assert took_s < DEADLINE_S
    at_prefill.join(DEADLINE_S)
    assert can_generate(servers, reference)
    wait_until(
        lambda: is_idle(servers.decode), "decode still holds the pages of the failed request"
    )
