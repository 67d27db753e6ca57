"""Requests sent to a prefill and a decode server at the same time, as a router sends them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from servers import ANSWER_S, Server, post

_room_ids = random.SystemRandom()
NUM_TOKENS = 12


class Answers(NamedTuple):
    """Responses of the two servers to one request."""

    prefill: dict[str, Any]
    decode: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        assert "error" not in self.decode, self.decode
        return list(self.decode["output_ids"])


def new_room() -> int:
    """Return a random room id of 63 bits, as routers do."""
    return _room_ids.randrange(1, 1 << 63)


def body(prompt: Sequence[int], prefill: Server, room: int, **more: Any) -> dict[str, Any]:
    """Return a request's body, which is the same for both servers."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
        },
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap,
        "bootstrap_room": room,
        **more,
    }


def generate(
    prompt: Sequence[int],
    prefill: Server,
    decode: Server,
    *,
    room: int | None = None,
    timeout_s: float = ANSWER_S,
    at_prefill: dict[str, Any] | None = None,
    **more: Any,
) -> Answers:
    """Send a request to both servers and wait for both. Only prefill gets ``at_prefill``."""
    request = body(prompt, prefill, room or new_room(), **more)
    responses: list[dict[str, Any]] = []

    def send_to_prefill() -> None:
        url = f"{prefill.url}/generate"
        responses.append(post(url, request | (at_prefill or {}), timeout_s))

    thread = threading.Thread(target=send_to_prefill, daemon=True)
    thread.start()
    answer = post(f"{decode.url}/generate", request, timeout_s)
    if "error" in answer:
        # Prefill would respond only after its own deadline.
        return Answers({}, answer)
    thread.join()
    return Answers(responses[0], answer)


def generate_all(
    prompts: Sequence[Sequence[int]], prefill: Server, decode: Server, **more: Any
) -> list[Answers]:
    """Send all requests at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(prompt, prefill, decode, **more), prompts))
