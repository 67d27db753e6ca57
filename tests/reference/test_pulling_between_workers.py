"""A worker pulls the prefix of a prompt from the instance that its request names.

Ranks are processes, endpoints and transports are real, requests come over HTTP. The answer must be,
token by token, that of one engine by itself, whatever the holder has or does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reference.driving import PROMPTS
from reference.working import (
    Alone,
    Caller,
    Neighbour,
    Reply,
    Worker,
    apart,
    body_of,
    call,
    hosted,
    options_for,
)

from kvferry import EndpointConfig, ProofMode
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Order, Parallel
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.options import InstanceOptions
from kvferry.reference.transfer.extensions import RoomExtension
from kvferry.transports.base import TransportSetup
from kvferry.transports.shm import ShmTransport
from kvferry.transports.transport_set import TransportSet

Models = dict[TinyKind, Path]
ONE, TWO, THREE = Parallel(), Parallel(tp=2), Parallel(tp=3)
# 6 layers, K and V, heads of 16 floats; of every KV head there is one over all ranks.
TOKEN_BYTES = {TinyKind.LLAMA: 6 * 2 * 3 * 16 * 4, TinyKind.QWEN3: 6 * 2 * 2 * 16 * 4}
# 150 tokens.
FIRST = PROMPTS[2]


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    return Alone(models)


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.close()


def cached(reply: Reply) -> int:
    return int(reply.document["usage"]["prompt_tokens_details"]["cached_tokens"])


async def sent(caller: Caller, worker: Worker) -> int:
    """The bytes that a worker has sent, once nothing is on its way."""
    told = await caller.idle(worker.url)
    return sum(told["carried_bytes"].values())


async def whole(caller: Caller, worker: Worker, prompt: tuple[int, ...], **own: Any) -> Reply:
    """Ask a worker for the whole answer."""
    more: dict[str, Any] = {"kvferry": own} if own else {}
    reply = await caller.post(worker.url, body_of(prompt, 12, **more))
    assert reply.status == 200, reply
    return reply


@pytest.mark.parametrize(
    ("kind", "holds", "asks"),
    [
        (TinyKind.LLAMA, (ONE, {"page": 32, "order": Order.HND}), (THREE, {})),
        (TinyKind.LLAMA, (THREE, {"page": 8}), (ONE, {"page": 64})),
        (TinyKind.QWEN3, (ONE, {}), (TWO, {"page": 24})),
    ],
    ids=["TP1 to 3", "TP3 to 1", "TP1 to 2"],
)
def test_the_next_turn_pulls_what_the_holder_has(
    models: Models,
    discovery: str,
    alone: Alone,
    neighbour: Neighbour,
    kind: TinyKind,
    holds: tuple[Parallel, dict[str, Any]],
    asks: tuple[Parallel, dict[str, Any]],
) -> None:
    """Generated tokens too. Only what the holder has and the other lacks travels."""
    (there, paged), (here, other) = holds, asks
    holder_options = options_for("decode", models[kind], discovery, there, engine=paged)
    asker_options = options_for("prefill", models[kind], discovery, here, engine=other)
    sizes = paged.get("page", 16), other.get("page", 16)

    async def talk(
        caller: Caller, asker: Worker, holder: Worker
    ) -> list[tuple[tuple[int, ...], Reply, int]]:
        first = await whole(caller, holder, FIRST)
        assert cached(first) == 0
        history = (*FIRST, *first.tokens)
        seen = []
        for prompt in ((*history, *PROMPTS[1]), (*history, *PROMPTS[0], 9)):
            before = await sent(caller, holder)
            reply = await whole(caller, asker, prompt, holder=holder.name)
            seen.append((prompt, reply, await sent(caller, holder) - before))
        return seen

    with hosted(asker_options) as (asker,), neighbour.runs(holder_options) as holder:
        seen = call(partial(talk, asker=asker, holder=holder))
    # The last token of an answer is not computed, and a holder has whole pages.
    held = (len(FIRST) + 11) // sizes[0] * sizes[0]
    held -= held % 16
    usable = held // sizes[1] * sizes[1]
    (prompt, reply, num_bytes), (again, other_reply, more_bytes) = seen
    assert [reply.tokens, other_reply.tokens] == alone(kind, [prompt, again])
    assert (cached(reply), reply.told["pulled"]) == (usable, usable)
    assert num_bytes == held * TOKEN_BYTES[kind]
    # The second has the same history, which is cached here by now. A part of a page is not.
    asked = (len(again) - 1) // sizes[1] * sizes[1] // 16 * 16
    assert other_reply.told["pulled"] == 0
    assert cached(other_reply) == usable
    assert more_bytes == max(0, min(held, asked) - usable) * TOKEN_BYTES[kind]


def test_a_changed_history_is_cut_at_the_right_token(
    models: Models, discovery: str, alone: Alone, neighbour: Neighbour
) -> None:
    options = [options_for(role, models[TinyKind.LLAMA], discovery, ONE) for role in ROLES]
    stripped = (*FIRST[:70], *FIRST[90:], *PROMPTS[1])

    async def talk(caller: Caller, asker: Worker, holder: Worker) -> Reply:
        await whole(caller, holder, FIRST)
        return await whole(caller, asker, stripped, holder=holder.name)

    with hosted(options[0]) as (asker,), neighbour.runs(options[1]) as holder:
        reply = call(partial(talk, asker=asker, holder=holder))
    assert [reply.tokens] == alone(TinyKind.LLAMA, [stripped])
    assert reply.told["pulled"] == cached(reply) == 64


ROLES = ("prefill", "decode")


def test_a_prefill_worker_with_a_room_pulls_and_sends_on(
    models: Models, discovery: str, alone: Alone, neighbour: Neighbour
) -> None:
    """Turn 2: prefill pulls from decode what decode generated, computes the rest and sends it."""
    prefill_options, decode_options = (
        options_for(role, models[TinyKind.LLAMA], discovery, parallel)
        for role, parallel in zip(ROLES, (THREE, ONE), strict=True)
    )

    async def talk(caller: Caller, prefill: Worker, decode: Worker) -> list[Any]:
        _, first = await caller.pair(prefill, decode, 1, body_of(FIRST))
        turn = (*FIRST, *first.tokens, *PROMPTS[1])
        before = await sent(caller, decode), await sent(caller, prefill)
        own = {"holder": decode.name}
        asked, second = await caller.pair(prefill, decode, 2, body_of(turn), **own)
        assert (asked.status, second.status) == (200, 200), (asked, second)
        after = await sent(caller, decode), await sent(caller, prefill)
        return [turn, asked, second, after[0] - before[0], after[1] - before[1]]

    with hosted(prefill_options) as (prefill,), neighbour.runs(decode_options) as decode:
        turn, asked, second, pulled, pushed = call(partial(talk, prefill=prefill, decode=decode))
    assert [second.tokens] == alone(TinyKind.LLAMA, [turn])
    # Both have the first 144 tokens of turn 1, decode also those up to 160.
    assert asked.told["pulled"] * TOKEN_BYTES[TinyKind.LLAMA] == pulled
    assert asked.told["pulled"] == 16
    assert cached(second) == cached(asked) == 160
    assert pushed == (len(turn) - 160) * TOKEN_BYTES[TinyKind.LLAMA] == second.told["bytes"]


def test_a_holder_that_is_unknown_or_has_nothing_costs_time_only(
    models: Models, discovery: str, alone: Alone, neighbour: Neighbour
) -> None:
    options = [options_for(role, models[TinyKind.LLAMA], discovery, ONE) for role in ROLES]

    async def talk(caller: Caller, asker: Worker, holder: Worker) -> list[Reply]:
        asked = (FIRST, holder.name), (PROMPTS[1], asker.name), (PROMPTS[0], "nobody")
        replies = [
            await whole(caller, asker, prompt, holder=name, deadline_s=1) for prompt, name in asked
        ]
        for worker in (asker, holder):
            await caller.idle(worker.url)
        return replies

    with hosted(options[0]) as (asker,), neighbour.runs(options[1]) as holder:
        replies = call(partial(talk, asker=asker, holder=holder))
    assert [reply.tokens for reply in replies] == alone(
        TinyKind.LLAMA, [FIRST, PROMPTS[1], PROMPTS[0]]
    )
    assert [reply.told["pulled"] for reply in replies] == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_holder_that_dies_or_stops_costs_time_only(
    models: Models, discovery: str, alone: Alone, number: signal.Signals
) -> None:
    folder = models[TinyKind.LLAMA]
    asker_options = options_for("prefill", folder, discovery, ONE)
    holder_options = options_for("decode", folder, discovery, ONE)

    async def talk(caller: Caller, asker: Worker, holder: Worker) -> list[Reply]:
        await whole(caller, holder, FIRST)
        # The two meet, so that the asker knows its peer.
        met = await whole(caller, asker, (*FIRST[:40], 1), holder=holder.name)
        assert holder.process is not None
        assert holder.process.pid is not None
        os.kill(holder.process.pid, number)
        late = await whole(caller, asker, (*FIRST, 3), holder=holder.name, deadline_s=1)
        holder.process.kill()
        await caller.idle(asker.url)
        return [met, late]

    with apart(holder_options) as (holder,), hosted(asker_options) as (asker,):
        met, late = call(partial(talk, asker=asker, holder=holder))
    assert [met.tokens, late.tokens] == alone(TinyKind.LLAMA, [(*FIRST[:40], 1), (*FIRST, 3)])
    assert (met.told["pulled"], late.told["pulled"]) == (32, 0)


class Careless(RoomExtension):
    """Endpoints whose transport says that it has copied and has not."""

    def make_transports(self) -> TransportSet:
        copies_nothing = TransportSetup(
            agent=f"careless-{os.urandom(4).hex()}", copy=lambda pieces, here, there: None
        )
        return TransportSet.of(ShmTransport(copies_nothing))


def test_without_the_copy_the_answer_is_wrong(models: Models, discovery: str, alone: Alone) -> None:
    """The negative control: what is pulled is used, and the comparisons above can fail."""
    folder = models[TinyKind.LLAMA]
    unproven = EndpointConfig(proof=ProofMode.OFF)
    source: InstanceOptions = options_for("decode", folder, discovery, ONE, name="careless")
    target = options_for("prefill", folder, discovery, ONE, endpoint=unproven)
    turn = (*FIRST, 3)

    async def talk(caller: Caller, asker: Worker, holder: Worker) -> Reply:
        await whole(caller, holder, FIRST)
        return await whole(caller, asker, turn, holder=holder.name)

    with hosted(source, target, extend={"careless": partial(Careless, source)}) as (holder, asker):
        reply = call(partial(talk, asker=asker, holder=holder))
    assert reply.told["pulled"] == 144
    assert [reply.tokens] != alone(TinyKind.LLAMA, [turn])
