"""Streams that begin with prefill's token: which ones, how they continue, and what may fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from limited import bounded
from router.fakes import MODEL, FakeWorker, Site, Wire
from router.test_adapters_vllm import PARAMS, FakeVllm

from kvferry.http.sse import EventReader
from kvferry.router.adapters import KvferryAdapter, SglangAdapter, VllmAdapter
from kvferry.router.bodies import ApiCall
from kvferry.router.first_token import continuation, may_continue
from kvferry.router.options import OnFailure, RouterOptions
from kvferry.router.serving import serving

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": "p", "max_tokens": 4, "temperature": 0, "stream": True}
# The fake model: its prompt is three tokens, and each answer counts on from the last one.
PROMPT = [1, 2, 3]


def call(path: str = "/v1/completions", **body: Any) -> ApiCall:
    body = {"model": MODEL} | body
    return ApiCall(path, body, MODEL, bool(body.get("stream")), OnFailure.LOCAL)


def prefilled(room: int, **changes: Any) -> bytes:
    """An answer of vLLM to prefill."""
    choice = {"text": " 4", "token_ids": [4], "finish_reason": "length"}
    choice |= {"prompt_token_ids": PROMPT} | changes.pop("choice", {})
    own = {"room": room, "prefill": "p", "tokens": len(PROMPT)} | changes.pop("own", {})
    answer = {
        "id": "a",
        "created": 5,
        "model": MODEL,
        "choices": [choice],
        PARAMS: {"kvferry": own},
    }
    return json.dumps(answer | changes).encode()


# ---------------------------------------------------------------- which requests


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        {"ignore_eos": True, "stream_options": {"include_usage": True}},
        {"prompt": None, "messages": [{"role": "user", "content": "p"}]},
        {"max_tokens": None, "max_completion_tokens": 9},
        {"seed": None, "stop": None, "n": 1, "user": "u"},
    ],
)
def test_a_stream_may_continue(change: dict[str, Any]) -> None:
    assert may_continue(call(**GREEDY | change))


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": "many"},
        {"seed": 3},
        {"stop": ["\n"]},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"echo": True},
        {"n": 2},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"bad_words": ["no"]},
        {"stop_token_ids": [7]},
        {"a_field_of_tomorrow": 1},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": 1},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
        {"messages": "no list"},
    ],
)
def test_a_stream_that_decode_must_begin(change: dict[str, Any]) -> None:
    assert not may_continue(call(**GREEDY | change))


def test_only_vllms_streams_begin_at_prefill() -> None:
    asked = call(**GREEDY)
    assert VllmAdapter().may_continue(asked)
    assert not SglangAdapter().may_continue(asked)
    assert not KvferryAdapter().may_continue(asked)
    assert not VllmAdapter().may_continue(call(**GREEDY | {"prompt": ["p", "q"]}))


# ---------------------------------------------------------------- which first tokens


def test_the_rest_is_asked_for_with_token_ids() -> None:
    rest = continuation(call(**GREEDY), prefilled(7), 7)
    assert rest is not None
    body = json.loads(VllmAdapter().for_rest(rest, 7, "p", 2.0))
    assert body == {
        **GREEDY,
        "model": MODEL,
        "prompt": [*PROMPT, 4],
        "max_tokens": 3,
        PARAMS: {"do_remote_prefill": True, "kvferry": {"room": 7, "prefill": "p", "tokens": 3}},
    }


@pytest.mark.parametrize(
    "document",
    [
        prefilled(7, choice={"finish_reason": "stop"}),
        prefilled(7, choice={"text": ""}),
        prefilled(7, choice={"text": " \N{REPLACEMENT CHARACTER}"}),
        prefilled(7, choice={"token_ids": None}),
        prefilled(7, choice={"token_ids": [4, 5]}),
        prefilled(7, own={"tokens": 2}),
        prefilled(7, own={"room": 8}),
        prefilled(7, **{PARAMS: None}),
        prefilled(7, choices=[]),
        prefilled(7, choice={"message": {"content": "", "reasoning": "hm"}, "text": None}),
        prefilled(7, choice={"message": {"content": "a", "tool_calls": [1]}, "text": None}),
        b"no answer",
    ],
)
def test_a_first_token_that_cannot_begin_the_stream(document: bytes) -> None:
    assert continuation(call(**GREEDY), document, 7) is None


# ---------------------------------------------------------------- a router among fakes


async def counts(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> Any:
    """Answers with the numbers after the prompt's last token."""
    params = body.get(PARAMS) or {}
    own = params.get("kvferry") or {}
    if params.get("do_remote_decode"):
        worker.wire.room(own["room"]).set()
        answer = json.loads(prefilled(own["room"]))
        if request.path == CHAT:
            choice = answer["choices"][0]
            answer["prompt_token_ids"] = choice.pop("prompt_token_ids")
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return web.json_response(answer)
    if own:
        await worker.wire.room(own["room"]).wait()
    prompt = body["prompt"] if isinstance(body.get("prompt"), list) else PROMPT
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    about = {"id": "of decode", "created": 9, "model": MODEL, "object": "text_completion"}
    for i in range(body["max_tokens"]):
        token = prompt[-1] + 1 + i
        end = "length" if i + 1 == body["max_tokens"] else None
        choice = {"index": 0, "text": f" {token}", "finish_reason": end, "token_ids": [token]}
        if i == 0:
            choice["prompt_token_ids"] = prompt
        await response.write(
            b"data: " + json.dumps(about | {"choices": [choice]}).encode() + b"\n\n"
        )
    usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
    last = about | {"choices": [], "usage": usage}
    await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
    return response


@asynccontextmanager
async def pair(decode: Any = counts, **options: Any) -> AsyncIterator[tuple[Site, list[FakeVllm]]]:
    """A router with one prefill and two decode workers, the first of which acts as given."""
    wire = Wire()
    workers = [
        FakeVllm("prefill", "p", wire, counts),
        FakeVllm("decode", "d", wire, decode),
        FakeVllm("decode", "e", wire, counts),
    ]
    for worker in workers:
        await worker.start()
    fields: dict[str, Any] = {"port": 0, "poll_s": 0.05, "engine": "vllm"} | options
    fields["prefill_urls"] = [f"p={workers[0].url}"]
    fields["decode_urls"] = [f"{each.name}={each.url}" for each in workers[1:]]
    try:
        async with (
            serving(msgspec.convert(fields, RouterOptions)) as url,
            aiohttp.ClientSession() as http,
        ):
            here = Site(url, {}, http)
            await here.until_up("p", "d", "e")
            yield here, workers
    finally:
        for worker in workers:
            await worker.stop()
        await asyncio.sleep(0.05)


async def streamed(here: Site, path: str = "completions", **change: Any) -> list[dict[str, Any]]:
    status, _, data = await here.post({"model": MODEL} | GREEDY | change, path)
    assert status == 200
    events = [event.data or "" for event in EventReader(1 << 20).feed(data)]
    assert events[-1] == "[DONE]" or events[-1].startswith('{"error"')
    return [json.loads(data) for data in events if data.startswith("{")]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)


@bounded
async def test_a_stream_is_one_answer_from_either_worker() -> None:
    async with pair() as (here, workers):
        chunks = await streamed(here, return_token_ids=True)
    assert text_of(chunks) == " 4 5 6 7"
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("a", 5)}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["token_ids"] for choice in choices] == [[4], [5], [6], [7]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT, None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    asked = workers[1].seen + workers[2].seen
    assert [body[PARAMS]["kvferry"]["tokens"] for body in asked] == [3]


@bounded
async def test_a_chat_continues_as_a_chat() -> None:
    messages = [{"role": "user", "content": "p"}]
    async with pair() as (here, _):
        chunks = await streamed(here, "chat/completions", prompt=None, messages=messages)
    assert text_of(chunks) == " 4 5 6 7"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


@bounded
async def test_the_first_token_does_not_wait_for_decode() -> None:
    release = asyncio.Event()

    async def waits(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> Any:
        await release.wait()
        return await counts(worker, request, body)

    async with pair(waits) as (here, workers):
        workers[2].act = waits
        body = json.dumps({"model": MODEL} | GREEDY)
        async with here.http.post(f"{here.url}/v1/completions", data=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b'" 4"' in first
            release.set()
            assert b'" 7"' in await response.read()


async def dies(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> Any:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@bounded
async def test_another_decode_continues_if_the_first_dies() -> None:
    async with pair(dies) as (here, workers):
        # Both decode workers get a turn as the first choice.
        for _ in range(2):
            assert text_of(await streamed(here)) == " 4 5 6 7"
        assert workers[1].seen
        assert workers[2].seen


async def loses(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> Any:
    if PARAMS not in body:
        return await counts(worker, request, body)
    return web.json_response({"error": {"message": "Internal server error"}}, status=500)


@bounded
async def test_decode_computes_the_longer_prompt_if_the_transfer_fails() -> None:
    async with pair(loses) as (here, workers):
        workers[2].act = loses
        assert text_of(await streamed(here)) == " 4 5 6 7"
        last = (workers[1].seen + workers[2].seen)[-1]
    assert last["prompt"] == [*PROMPT, 4]


@bounded
async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error() -> None:
    async with pair(loses, on_failure="fail") as (here, workers):
        workers[2].act = loses
        chunks = await streamed(here)
    assert text_of(chunks) == " 4"
    assert "could not load the prompt's cache" in chunks[-1]["error"]["message"]


@bounded
async def test_decode_begins_the_stream_if_the_option_says_so() -> None:
    async with pair(first_token="decode") as (here, _):
        chunks = await streamed(here)
    assert text_of(chunks) == " 4 5 6 7"
    assert {chunk["id"] for chunk in chunks} == {"of decode"}
