"""Requests to a prefill and a decode server at the same time, as a router sends them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from servers import ANSWER_S, Server, post

_rooms = random.SystemRandom()
NUM_TOKENS = 12


class Answers(NamedTuple):
    """What the two servers said of one request."""

    prefill: dict[str, Any]
    decode: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        assert "error" not in self.decode, self.decode
        return list(self.decode["output_ids"])


def new_room() -> int:
    """As routers draw them."""
    return _rooms.randrange(1, 1 << 63)


def body(prompt: Sequence[int], prefill: Server, room: int, **more: Any) -> dict[str, Any]:
    """A request's body, the same for both sides."""
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


def ask(
    prompt: Sequence[int],
    prefill: Server,
    decode: Server,
    *,
    room: int | None = None,
    timeout_s: float = ANSWER_S,
    at_prefill: dict[str, Any] | None = None,
    **more: Any,
) -> Answers:
    """Ask both sides, and wait for both. ``at_prefill`` is for that side alone."""
    asked = body(prompt, prefill, room or new_room(), **more)
    said: list[dict[str, Any]] = []

    def to_prefill() -> None:
        said.append(post(f"{prefill.url}/generate", asked | (at_prefill or {}), timeout_s))

    thread = threading.Thread(target=to_prefill, daemon=True)
    thread.start()
    answer = post(f"{decode.url}/generate", asked, timeout_s)
    if "error" in answer:
        # Prefill would wait for its own deadline.
        return Answers({}, answer)
    thread.join()
    return Answers(said[0], answer)


def ask_all(
    prompts: Sequence[Sequence[int]], prefill: Server, decode: Server, **more: Any
) -> list[Answers]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(prompt, prefill, decode, **more), prompts))
