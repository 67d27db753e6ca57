"""One worker computes the prompt, another the answer, and kvferry carries the cache.

Ranks are processes, endpoints and transports are real, requests come over HTTP.
The answer must be, token by token, what one engine by itself says afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from serve.driving import PROMPTS
from serve.working import Alone, Caller, Reply, Worker, apart, body_of, call, hosted, options_for

from kvferry.layout.layout import Order, Parallel
from kvferry.rendezvous.server import RendezvousServer
from kvferry.serve.fingerprint import fingerprint
from kvferry.serve.tiny import Kind
from kvferry.serve.transfer import EndpointSettings
from kvferry.serve.transfer_prefill import PrefillExtension
from kvferry.transport.base import Setup, Transport
from kvferry.transport.shm import ShmTransport

Models = dict[Kind, Path]

# Sixteen: those of other tests, and more of other lengths.
MANY = (
    *PROMPTS,
    *(tuple((7 * i + j * j) % 256 for j in range(20 + 5 * i)) for i in range(13)),
)
# 6 layers of 3 KV heads of 16 floats, K and V.
TOKEN_BYTES = 6 * 3 * 16 * 4 * 2
# Taken once from another implementation of the default model.
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
ONE, TP3 = Parallel(), Parallel(tp=3)


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    with RendezvousServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    return Alone(models)


async def all_at_once(
    caller: Caller, pair: list[Worker], prompts: Sequence[tuple[int, ...]], room: int = 0
) -> list[Reply]:
    """Decode's answers, after everything has been given back on both sides."""
    prefill, decode = pair
    both = await asyncio.gather(
        *(
            caller.pair(prefill, decode, room + i, body_of(prompt))
            for i, prompt in enumerate(prompts)
        )
    )
    for first, second in both:
        assert (first.status, second.status) == (200, 200), both
        assert second.told["source"] == "transferred"
        assert second.tokens[:1] == first.tokens
    for worker in pair:
        await caller.idle(worker.url)
    return [second for _, second in both]


async def carried(caller: Caller, worker: Worker) -> int:
    """The bytes that a worker's ranks have written so far."""
    told = await caller.health(worker.url)
    return sum(told["carried_bytes"].values())


def pair_of(
    folder: Path,
    rendezvous: str,
    prefill: Parallel,
    decode: Parallel,
    transport: str = "shm",
    **of_decode: Any,
) -> Any:
    """Two workers that are to be started."""
    there = {"page_tokens": 32, "order": Order.HND} | of_decode
    options = [
        options_for("prefill", folder, rendezvous, prefill, transport=transport),
        options_for("decode", folder, rendezvous, decode, transport=transport, engine=there),
    ]
    both_need_processes = min(prefill.num_ranks, decode.num_ranks) > 1
    return (apart if both_need_processes else hosted)(*options)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "transport"),
    [
        (Kind.LLAMA, TP3, ONE, "nixl"),
        (Kind.LLAMA, ONE, TP3, "shm"),
        (Kind.LLAMA, Parallel(pp=2), TP3, "shm"),
        (Kind.HYBRID, Parallel(tp=2), ONE, "shm"),
        (Kind.HYBRID, ONE, Parallel(tp=2), "nixl"),
        (Kind.LLAMA, TP3, ONE, "mooncake"),
    ],
    ids=str,
)
def test_the_answer_is_what_one_engine_says(
    models: Models,
    rendezvous: str,
    alone: Alone,
    kind: Kind,
    prefill: Parallel,
    decode: Parallel,
    transport: str,
) -> None:
    with pair_of(models[kind], rendezvous, prefill, decode, transport) as pair:
        replies = call(lambda caller: all_at_once(caller, pair, MANY))
    assert [reply.tokens for reply in replies] == alone(kind, MANY)


def test_only_what_is_new_is_sent(models: Models, rendezvous: str, alone: Alone) -> None:
    long, aligned = PROMPTS[2], PROMPTS[2][:96]
    longer = (*aligned, *PROMPTS[1])

    async def talk(caller: Caller, pair: list[Worker]) -> list[tuple[int, int, list[int]]]:
        seen = []
        for room, prompt in enumerate((aligned, aligned, longer, longer, long)):
            before = await carried(caller, pair[0])
            (reply,) = await all_at_once(caller, pair, [prompt], room)
            size = await carried(caller, pair[0]) - before
            assert size == reply.told["bytes"]
            # One head a rank here, heads before tokens there: a page is one piece on both sides.
            assert reply.told.get("path") == ("runs" if size else None)
            seen.append((reply.told["prefix"], size // TOKEN_BYTES, reply.tokens))
        return seen

    with pair_of(models[Kind.LLAMA], rendezvous, TP3, ONE) as pair:
        seen = call(partial(talk, pair=pair))
    # Decode's pages have 32 tokens. What fills them is there the next time.
    assert [(prefix, sent) for prefix, sent, _ in seen] == [
        (0, 96),
        (96, 0),
        (96, 32),
        (128, 0),
        (96, 54),
    ]
    answers = alone(Kind.LLAMA, [aligned, longer, long])
    assert [tokens for *_, tokens in seen] == [
        *(answers[0], answers[0]),
        *(answers[1], answers[1]),
        answers[2],
    ]


def test_a_real_model_says_the_same(smollm: Path, rendezvous: str) -> None:
    """Three KV heads on three ranks, to one."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    engine = {"cache_tokens": 1024, "max_requests": 4}

    async def talk(caller: Caller, pair: list[Worker]) -> Reply:
        prefill, _ = pair
        asked = body | {"kvferry": {"room": "smollm", "prefill": prefill.name, "deadline_s": 60}}
        first, second = await asyncio.gather(
            *(caller.post(worker.url, asked, "chat/completions") for worker in pair)
        )
        assert first.status == 200, first
        return second

    options = [
        options_for(role, smollm, rendezvous, parallel, engine=engine)
        for role, parallel in (("prefill", TP3), ("decode", ONE))
    ]
    with hosted(*options) as pair:
        reply = call(partial(talk, pair=pair))
    assert reply.told["source"] == "transferred"
    assert reply.tokens == PARIS
    answer = reply.document["choices"][0]["message"]["content"]
    assert answer == "The capital of France is Paris."


# ---------------------------------------------------------------- the negative control


class Careless(EndpointSettings, frozen=True, kw_only=True):
    """Settings of an endpoint whose transport says that it has copied and has not."""

    def make_transport(self) -> Transport:
        return ShmTransport(Setup(agent=self.name, copy=lambda pieces, here, there: None))


def test_without_the_copy_the_answer_is_wrong(
    models: Models, rendezvous: str, alone: Alone
) -> None:
    """The comparison above can fail."""
    folder = models[Kind.LLAMA]
    source = options_for("prefill", folder, rendezvous, ONE, name="careless")
    target = options_for("decode", folder, rendezvous, ONE)
    settings = Careless(name="careless", model=fingerprint(folder), rendezvous=rendezvous)
    with (
        hosted(source, extend=partial(PrefillExtension, settings)) as (prefill,),
        hosted(target) as (decode,),
    ):
        (reply,) = call(lambda caller: all_at_once(caller, [prefill, decode], PROMPTS[2:]))
    (right,) = alone(Kind.LLAMA, PROMPTS[2:])
    assert reply.tokens[0] == right[0]
    assert reply.tokens != right
