"""A worker takes as many requests as it says, and refuses more before anything is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from reference.driving import PROMPTS
from reference.working import (
    PATIENCE_S,
    Caller,
    Reply,
    Worker,
    body_of,
    call,
    hosted,
    options_for,
)

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Parallel
from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]

MAX_TOKENS = 12
NUM_TOKENS = len(PROMPTS[0]) + MAX_TOKENS


@contextmanager
def pair_with(models: Models, **limits: int) -> Iterator[list[Worker]]:
    """A prefill worker, and a decode worker with these limits."""
    with DiscoveryServer() as server:
        options = [
            options_for(role, models[TinyKind.LLAMA], server.url, Parallel(), engine=engine)
            for role, engine in (("prefill", {}), ("decode", limits))
        ]
        with hosted(*options) as running:
            yield running


def half(room: int, **ticket: Any) -> dict[str, Any]:
    """A body for one side alone."""
    own = {"room": room, "deadline_s": PATIENCE_S} | ticket
    return body_of(PROMPTS[0], max_tokens=MAX_TOKENS) | {"kvferry": own}


@pytest.mark.parametrize(
    "limits", [{"max_in_flight": 1}, {"max_in_flight_tokens": 2 * NUM_TOKENS - 1}]
)
def test_a_full_decode_refuses_before_prefill_has_computed(
    models: Models, limits: dict[str, int]
) -> None:
    with pair_with(models, **limits) as (prefill, decode):

        async def talk(caller: Caller) -> tuple[Reply, Reply, Reply, dict[str, Any]]:
            # Its prefill was not asked yet, so the first request stays.
            first = asyncio.create_task(caller.post(decode.url, half(1, prefill=prefill.name)))
            await caller.until(decode.url, lambda told: told["rooms"] == 1)
            waiting = asyncio.create_task(caller.post(prefill.url, half(2)))
            await caller.until(prefill.url, lambda told: told["rooms"] == 1)
            refused = await caller.post(decode.url, half(2, prefill=prefill.name))
            # Decode tells prefill, which does not wait for its deadline.
            declined = await waiting
            told = await caller.health(prefill.url)
            await caller.post(prefill.url, half(1))
            answered = await first
            for worker in (prefill, decode):
                await caller.idle(worker.url)
            return refused, declined, answered, told

        refused, declined, answered, told = call(talk)
    assert (refused.status, refused.document["error"]["code"]) == (429, "worker_full")
    assert "retry later" in refused.document["error"]["message"]
    assert declined.status == 503
    assert "not wanted at decode" in declined.document["error"]["message"]
    assert told["used_pages"] == 0
    assert answered.status == 200


def test_one_request_always_fits(models: Models) -> None:
    with pair_with(models, max_in_flight_tokens=1) as (_, decode):
        reply = call(lambda caller: caller.post(decode.url, body_of(PROMPTS[0])))
        assert reply.status == 200


def test_a_refusal_says_when_to_retry(models: Models) -> None:
    with pair_with(models, max_in_flight=1) as (prefill, decode):

        async def talk(caller: Caller) -> str:
            first = asyncio.create_task(caller.post(decode.url, half(1, prefill=prefill.name)))
            await caller.until(decode.url, lambda told: told["rooms"] == 1)
            path = f"{decode.url}/v1/completions"
            async with caller.session.post(path, json=body_of(PROMPTS[0])) as response:
                assert response.status == 429
                seconds = response.headers["Retry-After"]
            first.cancel()
            await caller.idle(decode.url)
            return seconds

        assert call(talk) == "1"
