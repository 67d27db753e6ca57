"""A router in front of vLLM: requests to both workers, and failed transfers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from limited import bounded
from router.fakes import MODEL, STREAM, FakeWorker, Site, Wire, chunk, completion, refusal

from kvferry import InputError
from kvferry.router.adapters import REPLICA_HEADER, VllmAdapter
from kvferry.router.bodies import ApiCall
from kvferry.router.options import EngineName, OnFailure, RouterOptions
from kvferry.router.serving import serving

PARAMS = "kv_transfer_params"


def ask(path: str = "/v1/completions", **body: Any) -> ApiCall:
    return ApiCall(path, {"model": "m"} | body, "m", False, OnFailure.LOCAL)


def test_prefill_gets_one_token_to_compute() -> None:
    adapter, asked = VllmAdapter(), ask(prompt="p", max_tokens=9, min_tokens=3, stream=True)
    prompt = json.loads(adapter.for_prefill(asked, 7, 2.0))
    assert prompt["max_tokens"] == 1
    assert not {"min_tokens", "stream"} & prompt.keys()
    assert prompt[PARAMS] == {"do_remote_decode": True, "kvferry": {"room": 7}}
    answer = json.loads(adapter.for_decode(asked, 7, "prefill-0", 2.0))
    assert (answer["max_tokens"], answer["stream"]) == (9, True)
    own = {"room": 7, "prefill": "prefill-0"}
    assert answer[PARAMS] == {"do_remote_prefill": True, "kvferry": own}


def test_chat_uses_max_completion_tokens() -> None:
    chat = ask("/v1/chat/completions", messages=[], max_completion_tokens=9)
    assert json.loads(VllmAdapter().for_prefill(chat, 7, 2.0))["max_completion_tokens"] == 1


@pytest.mark.parametrize("ask_for", [VllmAdapter().for_prefill, VllmAdapter().for_first_token])
def test_prefill_is_told_who_holds_the_prompt(ask_for: Callable[..., bytes]) -> None:
    asked = ask(prompt="p")
    told = json.loads(ask_for(asked, 7, 2.0, "decode-0"))
    assert told[PARAMS]["kvferry"] == {"room": 7, "holder": "decode-0"}
    assert "holder" not in json.loads(ask_for(asked, 7, 2.0))[PARAMS]["kvferry"]


def test_clients_cannot_choose_rooms() -> None:
    adapter, asked = VllmAdapter(), ask(prompt="p", kv_transfer_params={"kvferry": {"room": 1}})
    assert PARAMS not in json.loads(adapter.whole(asked))
    assert json.loads(adapter.for_decode(asked, 7, "p", 2.0))[PARAMS]["kvferry"]["room"] == 7


@pytest.mark.parametrize(
    ("body", "can_split"),
    [
        ({"prompt": "p"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"messages": [], "n": 1}, True),
        ({"prompt": "p", "n": 2}, False),
        ({"prompt": ["p", "q"]}, False),
        ({"prompt": [[1], [2]]}, False),
    ],
)
def test_batches_are_not_split(body: dict[str, Any], can_split: bool) -> None:
    assert VllmAdapter().can_split(ask(**body)) is can_split


def test_a_prefill_needs_its_instances_name() -> None:
    with pytest.raises(InputError, match="give 'http://h:1' as NAME=URL"):
        RouterOptions(engine=EngineName.VLLM, prefill_urls=("http://h:1",))
    RouterOptions(engine=EngineName.VLLM, prefill_urls=("p=http://h:1",))


def test_room_selects_the_replica_behind_one_url() -> None:
    adapter, asked = VllmAdapter(), ask(prompt="p")
    for room, replica in ((6, "0"), (7, "1"), (8, "2"), (9, "0")):
        assert adapter.headers("prefill-0*3", room) == {REPLICA_HEADER: replica}
        answer = json.loads(adapter.for_decode(asked, room, "prefill-0*3", 2.0))
        assert answer[PARAMS]["kvferry"]["prefill"] == f"prefill-0-dp{replica}"
    assert adapter.headers("prefill-0", 7) == {}


@pytest.mark.parametrize("name", ["p*", "p*x", "*2", "p*1", "p*0", "p*-2", "p*99999"])
def test_an_invalid_number_of_replicas_is_rejected(name: str) -> None:
    with pytest.raises(InputError, match=r"write NAME\*N, such as prefill-0\*2"):
        RouterOptions(engine=EngineName.VLLM, prefill_urls=(f"{name}=http://h:1",))


# ---------------------------------------------------------------- a router among fakes


class FakeVllm(FakeWorker):
    """Says that it is well in vLLM's words."""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._well)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        await self.listen(app)

    async def _well(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "more": 1}]})


async def computes(worker: FakeWorker, request: web.Request, body: Any) -> web.StreamResponse:
    params = body.get(PARAMS, {})
    if params.get("do_remote_decode"):
        worker.wire.room(params["kvferry"]["room"]).set()
    elif params:
        await worker.wire.room(params["kvferry"]["room"]).wait()
    return web.json_response(completion("transferred" if params else "local"))


async def loses(worker: FakeWorker, request: web.Request, body: Any) -> web.StreamResponse:
    if PARAMS not in body:
        return await computes(worker, request, body)
    if not body.get("stream"):
        return refusal(500, None, "Internal server error")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "Internal server error"}}\n\n')
    return response


def chat_chunk(finish_reason: str | None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


async def streams(request: web.Request, *events: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in (*events, b"data: [DONE]\n\n"):
        await response.write(event)
        # Let the router read each event by itself.
        await asyncio.sleep(0.01)
    return response


async def aborts(worker: FakeWorker, request: web.Request, body: Any) -> web.StreamResponse:
    """Answer as vLLM does while it shuts down: a stream may say nothing of the abort."""
    if not body.get("stream"):
        choice = {"index": 0, "text": "", "finish_reason": "abort"}
        return web.json_response(completion("") | {"choices": [choice]})
    begin = [chat_chunk(None, role="assistant", content="")] if "messages" in body else []
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}\n\n'
    return await streams(request, *begin, *([usage] if "stream_options" in body else []))


async def aborts_with_a_word(
    worker: FakeWorker, request: web.Request, body: Any
) -> web.StreamResponse:
    if not body.get("stream"):
        return await aborts(worker, request, body)
    if "messages" in body:
        begin = chat_chunk(None, role="assistant", content="")
        return await streams(request, begin, chat_chunk("abort", content=""))
    return await streams(request, chunk("").replace(b"null", b'"abort"'))


async def has_no_tokenizer(
    worker: FakeWorker, request: web.Request, body: Any
) -> web.StreamResponse:
    return refusal(500, None, "cannot schedule new futures after shutdown")


async def computes_or_streams(
    worker: FakeWorker, request: web.Request, body: Any
) -> web.StreamResponse:
    answer = await computes(worker, request, body)
    if not body.get("stream"):
        return answer
    if "messages" in body:
        begin = chat_chunk(None, role="assistant", content="")
        return await streams(request, begin, chat_chunk("stop", content="abort"))
    return await streams(request, STREAM.removesuffix(b"data: [DONE]\n\n"))


@asynccontextmanager
async def vllm_site(*workers: FakeVllm) -> AsyncIterator[Site]:
    """A router in front of these workers, which it sees."""
    for worker in workers:
        await worker.start()
    urls = {
        f"{role}_urls": [f"{w.name}={w.url}" for w in workers if w.role == role]
        for role in ("prefill", "decode")
    }
    options = msgspec.convert({"port": 0, "poll_s": 0.05, "engine": "vllm"} | urls, RouterOptions)
    try:
        async with serving(options) as url, aiohttp.ClientSession() as http:
            here = Site(url, {worker.name: worker for worker in workers}, http)
            await here.until_up(*here.workers)
            yield here
            await here.until_idle()
    finally:
        for worker in workers:
            await worker.stop()
        await asyncio.sleep(0.05)


async def asked(
    act: Any, *bodies: dict[str, Any], name: str = "p", prefills: Any = computes
) -> tuple[list[Any], list[FakeVllm]]:
    """The answers to some bodies, and the two workers that were there."""
    wire = Wire()
    workers = [FakeVllm("prefill", name, wire, prefills), FakeVllm("decode", "d", wire, act)]
    async with vllm_site(*workers) as here:
        return [await here.ask(**body) for body in bodies], workers


@bounded
async def test_both_workers_get_one_room() -> None:
    answers, (prefill, decode) = await asked(computes, {})
    assert [answer["choices"][0]["text"] for _, answer in answers] == ["transferred"]
    rooms = [worker.seen[0][PARAMS]["kvferry"]["room"] for worker in (prefill, decode)]
    assert rooms[0] == rooms[1]
    assert "seed" not in decode.seen[0]


@bounded
async def test_a_header_names_the_prefill_replica() -> None:
    heard: list[str | None] = []

    async def replica(worker: FakeWorker, request: web.Request, body: Any) -> web.StreamResponse:
        heard.append(request.headers.get(REPLICA_HEADER))
        return await computes(worker, request, body)

    _, (_, decode) = await asked(computes, {}, {}, {}, name="p*2", prefills=replica)
    named = [body[PARAMS]["kvferry"]["prefill"] for body in decode.seen]
    assert named == [f"p-dp{each}" for each in heard]
    assert len(heard) == 3


@bounded
async def test_after_a_failed_transfer_decode_computes_the_prompt() -> None:
    answers, (prefill, decode) = await asked(loses, {}, {"n": 2})
    assert [answer["choices"][0]["text"] for _, answer in answers] == ["local", "local"]
    assert (len(prefill.seen), len(decode.seen)) == (1, 3)


@bounded
async def test_a_failed_transfer_may_be_reported() -> None:
    fails = {"kvferry": {"on_failure": "fail"}}
    answers, _ = await asked(loses, fails, fails | {"stream": True})
    assert [status for status, _ in answers] == [502, 502]
    assert {answer["error"]["code"] for _, answer in answers} == {"kv_transfer_failed"}


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "p"}]}


STREAMED: dict[str, Any] = {"stream": True}
WITH_USAGE = STREAMED | {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("rejects", [aborts, aborts_with_a_word, has_no_tokenizer])
@pytest.mark.parametrize("form", [{}, STREAMED, WITH_USAGE])
@pytest.mark.parametrize("asks", [{"prompt": "p"}, CHAT])
@pytest.mark.parametrize("policy", [OnFailure.LOCAL, OnFailure.FAIL])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@bounded
async def test_a_worker_that_shuts_down_is_left_out(
    rejects: Any, form: Any, asks: Any, policy: str, role: str
) -> None:
    """Its health checks succeed, but every request is answered by another worker."""
    wire, act = Wire(), computes_or_streams
    names = [("prefill", "p"), ("decode", "d"), (role, "ends")]
    workers = [FakeVllm(*name, wire, act) for name in names]
    async with vllm_site(*workers) as here:
        workers[-1].act = rejects
        body = {"model": MODEL, "kvferry": {"on_failure": policy}, "max_tokens": 3} | asks | form
        for _ in range(3):
            path = "chat/completions" if "messages" in body else "completions"
            status, _, data = await here.post(body, path)
            assert status == 200
            assert b'"finish_reason": null' in data or b'"finish_reason": "length"' in data
            assert b'"finish_reason": "abort"' not in data
        assert len(workers[-1].seen) == 1
        state = (await here.state())["ends"]
        assert (state["up"], state["problem"]) == (False, "it accepts no new requests")
        # No decode computed a prompt itself.
        assert all(PARAMS in seen for seen in workers[1].seen)


@bounded
async def test_a_chat_that_fails_after_its_role_is_tried_again() -> None:
    async def fails(worker: FakeWorker, request: web.Request, body: Any) -> web.StreamResponse:
        if PARAMS not in body:
            return await computes_or_streams(worker, request, body)
        begin = chat_chunk(None, role="assistant", content="")
        return await streams(request, begin, b'data: {"error": {"message": "m", "code": 500}}\n\n')

    wire = Wire()
    workers = [FakeVllm("prefill", "p", wire, computes), FakeVllm("decode", "d", wire, fails)]
    async with vllm_site(*workers) as here:
        asked = {"model": MODEL, "stream": True} | CHAT
        status, _, data = await here.post(asked, "chat/completions")
        assert status == 200
        assert b"error" not in data
        assert data.endswith(b"data: [DONE]\n\n")
