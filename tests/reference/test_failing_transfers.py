"""A failure of one request concerns that request only, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from reference.driving import PROMPTS
from reference.working import (
    PATIENCE_S,
    Alone,
    Caller,
    Reply,
    Worker,
    body_of,
    call,
    hosted,
    is_idle,
    options_for,
)

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Parallel
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.options import InstanceOptions
from kvferry.reference.ranks.processes import RankLost
from kvferry.reference.worker.instance import run_instance

Models = dict[TinyKind, Path]

ONE, TP3 = Parallel(), Parallel(tp=3)
# Nearly the whole cache, and a hundred steps where each computes little.
LONG = tuple((5 * i * i + 3 * i) % 256 for i in range(1900))
SLOW = {"step_tokens": 32}


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    return Alone(models)


@pytest.fixture(scope="module")
def pair(models: Models, discovery: str) -> Iterator[list[Worker]]:
    options = [
        options_for(role, models[TinyKind.LLAMA], discovery, ONE, engine=engine)
        for role, engine in (("prefill", SLOW), ("decode", {}))
    ]
    with hosted(*options) as running:
        yield running


def half(prompt: tuple[int, ...], room: int, **ticket: Any) -> dict[str, Any]:
    """A body for one side alone."""
    return body_of(prompt) | {"kvferry": {"room": room, "deadline_s": PATIENCE_S} | ticket}


async def both_idle(caller: Caller, pair: list[Worker]) -> None:
    for worker in pair:
        await caller.idle(worker.url)


async def right_again(caller: Caller, pair: list[Worker], room: int) -> Reply:
    """A request like any other, to see that both still serve."""
    first, second = await caller.pair(pair[0], pair[1], room, body_of(PROMPTS[2]))
    assert (first.status, second.status) == (200, 200), (first, second)
    assert second.told["source"] == "transferred"
    await both_idle(caller, pair)
    return second


# ---------------------------------------------------------------- callers that leave


def test_leaving_in_the_middle_of_a_stream_frees_both_sides(
    pair: list[Worker], alone: Alone
) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> Reply:
        body = body_of(PROMPTS[2], max_tokens=1500)
        ticket = {"room": 1, "prefill": prefill.name, "deadline_s": PATIENCE_S}
        first = asyncio.create_task(caller.post(prefill.url, body | {"kvferry": ticket}))
        streamed = body | {"kvferry": ticket, "stream": True}
        async with caller.session.post(f"{decode.url}/v1/completions", json=streamed) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            assert (await caller.health(decode.url))["running"] == 1
            response.close()
        assert (await first).status == 200
        await both_idle(caller, pair)
        return await right_again(caller, pair, 2)

    assert [call(talk).tokens] == alone(TinyKind.LLAMA, PROMPTS[2:])


def test_leaving_before_the_first_token_frees_both_sides(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> Reply:
        # A prompt of its own: one that was cached would be over before its caller leaves.
        body = half(LONG[::-1], 11, prefill=prefill.name)
        there = asyncio.create_task(caller.post(decode.url, body))
        await caller.until(decode.url, lambda told: told["rooms"] == 1)
        here = asyncio.create_task(caller.post(prefill.url, body))
        await caller.until(prefill.url, lambda told: told["running"] == 1)
        there.cancel()
        reply = await here
        await both_idle(caller, pair)
        await right_again(caller, pair, 12)
        return reply

    reply = call(talk)
    assert reply.status == 503
    assert "given up at decode" in reply.document["error"]["message"]


def test_leaving_as_the_body_arrives_frees_decode(pair: list[Worker]) -> None:
    """The cancellation meets a body, or a first piece, that is there already.

    Each caller names a prefill that sends nothing, so a room that outlives its caller stays for
    its deadline and is seen here.
    """
    where = urlsplit(pair[1].url)
    address = where.hostname or "", where.port or 0

    def begin(data: bytes) -> socket.socket:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        sock = socket.create_connection(address, timeout=10)
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data))
        return sock

    for batch in range(10):
        bodies = [
            msgspec.json.encode(half(PROMPTS[0], 1000 + room, prefill=pair[0].name))
            for room in range(40 * batch, 40 * batch + 40)
        ]
        # All handlers wait for their bodies before the first of those comes.
        callers = [begin(body) for body in bodies]
        for caller, body in zip(callers, bodies, strict=True):
            caller.sendall(body)
            caller.close()
    call(lambda caller: caller.until(pair[1].url, is_idle, seconds=10))


def test_an_offer_that_was_taken_back_before_prefill_began(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> Reply:
        body = half(PROMPTS[2], 13, prefill=prefill.name)
        there = asyncio.create_task(caller.post(decode.url, body))
        await caller.until(decode.url, lambda told: told["rooms"] == 1)
        there.cancel()
        await caller.idle(decode.url)
        reply = await caller.post(prefill.url, half(PROMPTS[2], 13, deadline_s=5))
        await caller.idle(prefill.url)
        return reply

    # It may be told in the step that computes the prompt, or just after it.
    assert call(talk).status in (200, 503)


def test_leaving_prefill_frees_it_and_decode_is_told(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> Reply:
        here = asyncio.create_task(caller.post(prefill.url, half(LONG, 22)))
        there = asyncio.create_task(caller.post(decode.url, half(LONG, 22, prefill=prefill.name)))
        await caller.until(prefill.url, lambda told: told["running"] == 1)
        here.cancel()
        reply = await there
        await both_idle(caller, pair)
        return reply

    reply = call(talk)
    assert reply.status == 503
    assert reply.document["error"]["code"] == "kv_transfer_failed"
    assert "aborted" in reply.document["error"]["message"]


def test_a_prompt_waits_until_decode_has_pages(pair: list[Worker], alone: Alone) -> None:
    """Prefill computes nothing, and holds nothing, for a decode that is full."""
    prefill, decode = pair

    async def talk(caller: Caller) -> Reply:
        full = body_of(PROMPTS[1], max_tokens=1990) | {"stream": True}
        async with caller.session.post(f"{decode.url}/v1/completions", json=full) as response:
            await response.content.readuntil(b"\n\n")
            here = asyncio.create_task(caller.post(prefill.url, half(PROMPTS[2], 23)))
            there = asyncio.create_task(
                caller.post(decode.url, half(PROMPTS[2], 23, prefill=prefill.name))
            )
            await caller.until(decode.url, lambda told: told["waiting"] == 1)
            await caller.until(prefill.url, lambda told: told["waiting"] == 1)
            # Another prompt overtakes it, so it is not the engine that is late.
            assert (await caller.post(prefill.url, body_of(PROMPTS[1]))).status == 200
            told = await caller.until(prefill.url, lambda told: told["running"] == 0)
            assert (told["waiting"], told["used_pages"]) == (1, 0)
            response.close()
        assert (await here).status == 200
        reply = await there
        await both_idle(caller, pair)
        return reply

    reply = call(talk)
    assert reply.told["source"] == "transferred"
    assert [reply.tokens] == alone(TinyKind.LLAMA, PROMPTS[2:])


# ---------------------------------------------------------------- transfers that fail


def test_an_unknown_prefill_instance(pair: list[Worker]) -> None:
    _, decode = pair

    async def talk(caller: Caller) -> Reply:
        body = half(PROMPTS[2], 31, prefill="nobody", deadline_s=0.5)
        reply = await caller.post(decode.url, body)
        await caller.idle(decode.url)
        return reply

    failed = call(talk)
    assert failed.status == 503
    assert failed.document["error"]["type"] == "server_error"
    assert failed.document["error"]["code"] == "kv_transfer_failed"
    assert "nobody has registered as 'nobody'" in failed.document["error"]["message"]


def test_a_request_without_a_room_is_reported_as_recomputed(
    pair: list[Worker], alone: Alone
) -> None:
    """It asks decode alone, without a room, and its client reads where the prompt came from."""
    _, decode = pair

    async def talk(caller: Caller) -> list[Reply]:
        replies = [await caller.post(decode.url, body_of(PROMPTS[1])) for _ in range(2)]
        await caller.idle(decode.url)
        return replies

    replies = call(talk)
    assert {reply.told["source"] for reply in replies} == {"recomputed"}
    assert [reply.tokens for reply in replies] == alone(TinyKind.LLAMA, PROMPTS[1:2]) * 2
    assert replies[1].told["prefix"] == 16
    assert "room" not in replies[0].told


def test_both_sides_get_different_prompts(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        replies = await asyncio.gather(
            caller.post(prefill.url, half(PROMPTS[1], 41)),
            caller.post(decode.url, half(PROMPTS[2], 41, prefill=prefill.name)),
        )
        await both_idle(caller, pair)
        return replies

    _, failed = call(talk)
    assert failed.status == 503
    code = failed.document["error"]["message"].partition(":")[0]
    assert code in ("tokens-differ", "not-all-pushed")


def test_another_prompt_of_the_same_length_under_the_same_room(
    pair: list[Worker], alone: Alone
) -> None:
    """Decode uses nothing that prefill computed, and leaves none of it in the prefix cache."""
    prefill, decode = pair
    a, b = (tuple((31 + 7 * i + k) % 200 for i in range(49)) for k in (0, 3))

    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        here = asyncio.create_task(caller.post(prefill.url, half(a, 42)))
        refused = await caller.post(decode.url, half(b, 42, prefill=prefill.name))
        await here
        await both_idle(caller, pair)
        _, after = await caller.pair(prefill, decode, 43, body_of(b))
        await both_idle(caller, pair)
        return refused, after

    refused, after = call(talk)
    assert refused.status == 503
    assert refused.document["error"]["message"].startswith("content-differs")
    assert after.told["prefix"] == 0, "nothing that came may be found again"
    assert [after.tokens] == alone(TinyKind.LLAMA, [b])


def test_a_room_that_is_taken_is_refused_and_goes_on(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        first = asyncio.create_task(caller.post(prefill.url, half(PROMPTS[2], 51)))
        await caller.until(prefill.url, lambda told: told["rooms"] == 1)
        refused = await caller.post(prefill.url, half(PROMPTS[1], 51))
        answer = await caller.post(decode.url, half(PROMPTS[2], 51, prefill=prefill.name))
        assert (await first).status == 200
        await both_idle(caller, pair)
        return refused, answer

    refused, answer = call(talk)
    assert refused.status == 503
    assert "51 is open already" in refused.document["error"]["message"]
    assert answer.told["source"] == "transferred"


def test_no_pages_in_time(pair: list[Worker]) -> None:
    """Decode is full until it is too late; prefill says so, and computes nothing."""
    prefill, decode = pair

    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        full = body_of(PROMPTS[1], max_tokens=1990) | {"stream": True}
        async with caller.session.post(f"{decode.url}/v1/completions", json=full) as response:
            await response.content.readuntil(b"\n\n")
            ticket = {"prefill": prefill.name, "deadline_s": 0.3}
            there = asyncio.create_task(caller.post(decode.url, half(PROMPTS[2], 61, **ticket)))
            await caller.until(decode.url, lambda told: told["waiting"] == 1)
            here = await caller.post(prefill.url, half(PROMPTS[2], 61, **ticket))
            response.close()
        replies = here, await there
        await both_idle(caller, pair)
        return replies

    for reply in call(talk):
        assert reply.status == 503
        assert reply.document["error"]["message"].startswith("deadline")


# ---------------------------------------------------------------- ranks that die


def in_thread(options: InstanceOptions) -> tuple[Worker, Future[BaseException | None]]:
    """A worker as its process would run it, and what it ends with."""
    ready: Future[str] = Future()
    ended: Future[BaseException | None] = Future()

    def run() -> None:
        try:
            run_instance(options, ready.set_result)
        except BaseException as error:
            ended.set_result(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return Worker(options.name, ready.result(PATIENCE_S)), ended


def test_a_killed_prefill_rank(models: Models, discovery: str, alone: Alone) -> None:
    folder = models[TinyKind.LLAMA]

    def prefill_with(parallel: Parallel) -> InstanceOptions:
        engine = SLOW | {"timeout_s": 20.0, "cache_tokens": 4096}
        return options_for("prefill", folder, discovery, parallel, name="mortal", engine=engine)

    async def talk(caller: Caller, prefill: Worker, decode: Worker) -> list[Reply]:
        bodies = [half(LONG, room, prefill=prefill.name) for room in (71, 72)]
        second = [asyncio.create_task(caller.post(decode.url, body)) for body in bodies]
        await caller.until(decode.url, lambda told: told["rooms"] == 2)
        first = [asyncio.create_task(caller.post(prefill.url, body)) for body in bodies]
        await caller.until(prefill.url, lambda told: told["running"] == 2)
        (rank,) = (c for c in multiprocessing.active_children() if c.name == "rank-1")
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        replies = await asyncio.gather(*first, *second)
        await caller.idle(decode.url)
        return list(replies)

    decode_options = options_for("decode", folder, discovery, ONE, engine={"cache_tokens": 4096})
    with hosted(decode_options) as (decode,):
        prefill, ended = in_thread(prefill_with(TP3))
        *first, one, two = call(partial(talk, prefill=prefill, decode=decode))
        assert isinstance(ended.result(PATIENCE_S), RankLost)
        assert {reply.status for reply in (*first, one, two)} == {503}
        for reply in (one, two):
            assert reply.document["error"]["code"] == "kv_transfer_failed"
        # The next life of that name, on other ranks, is as good.
        with hosted(prefill_with(ONE)) as (again,):
            reply = call(lambda caller: right_again(caller, [again, decode], 73))
    assert [reply.tokens] == alone(TinyKind.LLAMA, PROMPTS[2:])


def test_idle_means_nothing_is_left() -> None:
    told = {"running": 0, "waiting": 0, "rooms": 0, "used_pages": 0}
    assert is_idle(told)
    assert not any(is_idle(told | {name: 1}) for name in told)
