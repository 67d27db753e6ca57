"""With a cluster key, a worker refuses requests for a room that are not signed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reference.driving import PROMPTS
from reference.working import Caller, Reply, Worker, body_of, call, hosted, options_for

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Parallel
from kvferry.reference.api.bodies import Serving, parse_completion
from kvferry.reference.models.tiny import TinyKind, byte_tokenizer
from kvferry.reference.models.tokenizer import Tokenizer, TokenizerSettings
from kvferry.router.options import OnFailure, RouterOptions
from kvferry.router.serving import serving
from kvferry.security.keys import ClusterKey
from kvferry.security.signing import RequestVerifier, SignatureFault, sign

KEY = ClusterKey.new()
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    KEY.write(path)
    return str(path)


@pytest.fixture(scope="module")
def pair(models: dict[TinyKind, Path], key_file: str) -> Iterator[list[Worker]]:
    with DiscoveryServer(key=KEY) as server:
        options = [
            options_for(role, models[TinyKind.LLAMA], server.url, Parallel(), key_file=key_file)
            for role in ("prefill", "decode")
        ]
        with hosted(*options) as running:
            yield running


def half(room: int, **ticket: Any) -> bytes:
    own = {"kvferry": {"room": room, "deadline_s": 60} | ticket}
    return msgspec.json.encode(body_of(PROMPTS[2]) | own)


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.document["error"]["code"]


def test_unsigned_requests_open_no_room(pair: list[Worker]) -> None:
    async def talk(caller: Caller) -> None:
        unsigned: dict[str, str]
        for unsigned in ({}, {"Authorization": "Bearer x"}):
            for worker in pair:
                body = half(1, prefill=pair[0].name)
                reply = await caller.send(worker.url, "POST", PATH, body, unsigned)
                assert code(reply) == (401, "ticket_unsigned")
        assert [(await caller.health(worker.url))["rooms"] for worker in pair] == [0, 0]

    call(talk, KEY)


def test_a_signature_is_valid_once_for_one_request_and_worker(pair: list[Worker]) -> None:
    prefill, decode = pair

    async def refused(caller: Caller, url: str, body: bytes, header: str) -> str:
        reply = await caller.send(url, "POST", PATH, body, {"Authorization": header})
        assert reply.status == 401
        return str(reply.document["error"]["code"])

    async def talk(caller: Caller) -> list[str]:
        body = half(11)
        good = (await caller.signed(prefill.url, "POST", PATH, body))["Authorization"]
        life = good.split()[1].split(":")[0]
        signed = {"Authorization": good}
        opened = asyncio.create_task(caller.send(prefill.url, "POST", PATH, body, signed))
        await caller.until(prefill.url, lambda told: told["rooms"] == 1)
        seen = [
            await refused(caller, prefill.url, body, good),
            await refused(caller, prefill.url, half(12), good),
            await refused(caller, prefill.url, half(11, deadline_s=3600), good),
            await refused(caller, decode.url, body, good),
        ]
        for key, for_life, now in (
            (KEY.http, life, time.time() - 1000),
            (KEY.http, RequestVerifier(KEY.http).life, time.time()),
            (bytes(32), life, time.time()),
        ):
            forged = sign(key, for_life, "POST", PATH, body, now)
            seen.append(await refused(caller, prefill.url, body, forged))
        opened.cancel()
        await caller.idle(prefill.url)
        return seen

    doubts = [
        *(
            SignatureFault.REPLAYED,
            SignatureFault.OTHER_KEY,
            SignatureFault.OTHER_KEY,
            SignatureFault.OTHER_LIFE,
        ),
        *(SignatureFault.CLOCK, SignatureFault.OTHER_LIFE, SignatureFault.OTHER_KEY),
    ]
    assert call(talk, KEY) == [f"ticket_{doubt}".replace("-", "_") for doubt in doubts]


def test_the_router_signs_for_its_clients(pair: list[Worker], key_file: str) -> None:
    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        prefill, decode = pair
        strange = RouterOptions(
            port=0,
            poll_s=0.05,
            on_failure=OnFailure.FAIL,
            prefill_urls=(prefill.url,),
            decode_urls=(decode.url,),
        )
        given = msgspec.structs.replace(strange, key=key_file)
        body = msgspec.json.encode(body_of(PROMPTS[2]))
        replies = []
        for options in (given, strange):
            async with serving(options) as url:
                while not all(w["up"] for w in (await caller.health(url))["workers"]):
                    await asyncio.sleep(0.01)
                replies.append(await caller.send(url, "POST", PATH, body, {}))
        for worker in pair:
            await caller.idle(worker.url)
        return replies[0], replies[1]

    answer, refused = call(talk)
    assert answer.status == 200, answer
    assert answer.told["source"] == "transferred"
    assert code(refused) == (502, "ticket_unsigned")


def test_a_request_without_a_room_needs_a_signature_too(pair: list[Worker]) -> None:
    body = msgspec.json.encode(body_of(PROMPTS[0], 2))

    async def talk(caller: Caller) -> tuple[Reply, Reply]:
        unsigned = await caller.send(
            pair[1].url, "POST", PATH, body, {"Authorization": "Bearer sk-none"}
        )
        return unsigned, await caller.post(pair[1].url, body_of(PROMPTS[0], 2))

    unsigned, signed = call(talk, KEY)
    assert code(unsigned) == (401, "ticket_unsigned")
    assert signed.status == 200


@pytest.mark.parametrize(("wanted_s", "held_s"), [(3600.0, 60.0), (5.0, 5.0), (None, 60.0)])
def test_a_room_holds_pages_no_longer_than_the_worker_allows(
    wanted_s: float | None, held_s: float
) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), TokenizerSettings())
    options = options_for("prefill", Path("/x"), "http://127.0.0.1:1", Parallel(), deadline_s=60.0)
    ticket = {"room": 1} | ({"deadline_s": wanted_s} if wanted_s else {})
    body = msgspec.json.encode(body_of((1, 2)) | {"kvferry": ticket})
    before = time.monotonic()
    job = parse_completion(body, Serving(options, tokenizer, 2048))
    assert held_s <= job.transfer_deadline - before < held_s + 5


def test_only_the_key_drains_workers(pair: list[Worker], key_file: str) -> None:
    decode = pair[1]
    options = RouterOptions(port=0, key=key_file, decode_urls=(decode.url,), poll_s=0.1)

    async def talk(caller: Caller) -> None:
        assert code(await caller.send(decode.url, "POST", "/drain", b"", {}))[0] == 401
        async with serving(options) as url:
            path = f"/drain/{decode.name}"
            assert code(await caller.send(url, "POST", path, b"", {})) == (401, "ticket_unsigned")
            assert (await caller.health(decode.url))["status"] == "ok"
            await caller.until(url, lambda told: told["workers"][0]["up"])
            headers = await caller.signed(url, "POST", path)
            reply = await caller.send(url, "POST", path, b"", headers)
            assert (reply.status, reply.document) == (200, {"status": "draining"})
            await caller.until(decode.url, lambda told: told["status"] == "draining")
            refused = await caller.post(decode.url, body_of(PROMPTS[0]))
            assert code(refused) == (503, "worker_draining")

    call(talk, KEY)
