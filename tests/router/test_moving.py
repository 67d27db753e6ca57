"""Streams that move to another worker, and workers that drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web
from limited import bounded
from router.fakes import MODEL, Act, Body, FakeWorker, Site, completion, refuses, site, until

from kvferry.http.sse import EventReader
from kvferry.router.bodies import ApiCall
from kvferry.router.moving import StreamedAnswer
from kvferry.router.options import OnFailure

# ---------------------------------------------------------------- what is recorded


def call(**body: Any) -> ApiCall:
    return ApiCall("/v1/completions", {"model": MODEL, **body}, MODEL, True, OnFailure.LOCAL)


def event(*choices: dict[str, Any], answer: str = "a", **more: Any) -> bytes:
    about = {"id": answer, "created": 1 if answer == "a" else 2, "choices": choices}
    return b"data: " + json.dumps(about | more, separators=(",", ":")).encode() + b"\n\n"


def text(shown: str, *tokens: int, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": shown, "finish_reason": finish, "token_ids": list(tokens)}


def seen(answer: StreamedAnswer, events: Iterable[bytes]) -> list[Any]:
    """The documents that the client gets."""
    reader = EventReader(1 << 20)
    raw = b"".join(answer.rewrite(one) for data in events for one in reader.feed(data))
    return [json.loads(one.data or "") for one in reader.feed(raw)]


def test_the_rest_is_asked_for_after_all_tokens() -> None:
    answer = StreamedAnswer(call(answered_token_ids=[7], max_tokens=9))
    seen(answer, [event(text("x", 1)), event(text("", 2, 3))])
    assert answer.can_move
    assert answer.rest.body["answered_token_ids"] == [7, 1, 2, 3]
    assert answer.rest.body["max_tokens"] == 9


def test_a_client_gets_token_ids_only_if_it_asks() -> None:
    events = [event(text("x", 1)), event(text("", 2)), event(text("y", 3, finish="stop"))]
    assert seen(StreamedAnswer(call(return_token_ids=True)), events) == [
        json.loads(one[6:]) for one in events
    ]
    shown = seen(StreamedAnswer(call()), events)
    assert [one["choices"][0]["text"] for one in shown] == ["x", "y"]
    assert not any("token_ids" in one["choices"][0] for one in shown)


def test_a_moved_answer_is_one_answer() -> None:
    answer = StreamedAnswer(call())
    shown = seen(answer, [event(text("x", 1)), event(text("y", 2), answer="b")])
    assert [(one["id"], one["created"]) for one in shown] == [("a", 1), ("a", 1)]
    usage = seen(answer, [event(answer="b", usage={"total_tokens": 3})])
    assert usage[0]["usage"] == {"total_tokens": 3}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event({"index": 0, "delta": {"role": "assistant", "content": ""}})],
        [event(text("x", 1, finish="stop"))],
        [event(text("x", 1)), event({"index": 0, "text": "y"})],
    ],
    ids=["nothing", "role", "finished", "unknown tokens"],
)
def test_an_answer_that_cannot_move(events: list[bytes]) -> None:
    answer = StreamedAnswer(call())
    seen(answer, events)
    assert not answer.can_move
    # So its error is the client's.
    assert seen(answer, [b'data: {"error":{"code":"c"}}\n\n'])
    assert not answer.failure


def test_an_error_waits_for_another_worker() -> None:
    answer = StreamedAnswer(call())
    assert len(seen(answer, [event(text("x", 1)), b'data: {"error":{"code":"c"}}\n\n'])) == 1
    assert json.loads(answer.failure)["error"]["code"] == "c"


# ---------------------------------------------------------------- workers

LENGTH = 40


def counts(until_token: int = LENGTH, then: Act | None = None) -> Act:
    """Streams one token after the other; waits for the gate before ``until_token``."""

    async def act(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
        answered = body.get("answered_token_ids", [])
        assert answered == list(range(len(answered)))
        own = body.get("kvferry") or {}
        if "room" in own:
            await worker.wire.room(own["room"]).wait()
        if not body.get("stream"):
            assert body["max_tokens"] == len(answered) + 1
            return web.json_response(completion("0"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(len(answered), LENGTH):
            if token == until_token:
                await worker.gate.wait()
                if then is not None:
                    return await then(worker, request, body)
            if token > until_token:
                await asyncio.sleep(0.01)
            finish = "length" if token == LENGTH - 1 else None
            await response.write(event(text(f"{token} ", token, finish=finish), answer=worker.name))
        await response.write(b"data: [DONE]\n\n")
        return response

    return act


async def breaks(worker: FakeWorker, request: web.Request, body: Body) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answer_of(raw: bytes) -> str:
    *events, end = [one.data for one in EventReader(1 << 20).feed(raw) if one.data]
    assert end == "[DONE]", raw
    chunks = [json.loads(one) for one in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


WHOLE = "".join(f"{token} " for token in range(LENGTH))


async def stream(here: Site, **fields: Any) -> bytes:
    _, _, raw = await here.post({"model": MODEL, "stream": True} | fields)
    return bytes(raw)


async def moved(here: Site, reason: str) -> float:
    async with here.http.get(f"{here.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = f'kvferry_router_move_seconds_count{{reason="{reason}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def drain_under_a_stream(here: Site) -> bytes:
    """Drain the worker that streams, let it send the rest, and return the whole stream."""
    asking = asyncio.create_task(stream(here))
    await until(lambda: here["d0"].seen)
    here["d0"].status = "draining"
    await here.until_up("d0", up=False)
    here["d0"].gate.set()
    return await asking


@bounded
async def test_a_stream_leaves_a_draining_worker_for_another() -> None:
    async with site(1, 2, acts={"d0": counts(2), "d1": counts()}) as here:
        assert answer_of(await drain_under_a_stream(here)) == WHOLE
        pull, rest = here["d1"].seen
        assert pull["kvferry"] == {"holder": "d0"}
        # The first worker goes on during the pull, so this computes what came since.
        assert "kvferry" not in rest
        assert len(rest["answered_token_ids"]) >= len(pull["answered_token_ids"]) > 1
        assert await moved(here, "drain") == 1
        # Its connection is closed, so that it stops.
        await here.until_idle()


@pytest.mark.parametrize("other", [refuses(500, "internal"), refuses(429, "worker_full"), breaks])
@bounded
async def test_a_stream_stays_where_it_is_if_no_other_worker_takes_it(other: Act) -> None:
    async with site(1, 2, acts={"d0": counts(2), "d1": other}) as here:
        assert answer_of(await drain_under_a_stream(here)) == WHOLE
        assert here["d1"].seen
        assert await moved(here, "drain") == 0


@bounded
async def test_the_only_decode_worker_finishes_its_streams() -> None:
    async with site(1, 1, acts={"d0": counts(2)}) as here:
        assert answer_of(await drain_under_a_stream(here)) == WHOLE


@pytest.mark.parametrize("policy", ["local", "retry", "fail"])
@bounded
async def test_a_stream_goes_on_after_its_worker_broke(policy: str) -> None:
    acts = {"d0": counts(2, breaks), "d1": counts()}
    async with site(1, 2, acts=acts, on_failure=policy) as here:
        here["d0"].gate.set()
        raw = await stream(here)
        if policy == "fail":
            assert b"worker_failed" in raw
            assert not here["d1"].seen
        else:
            assert answer_of(raw) == WHOLE
            # Its prompt goes through a prefill worker again.
            assert here["d1"].seen[0]["kvferry"]["prefill"] == "p0"
            assert await moved(here, "failure") == 1


@bounded
async def test_a_stream_that_breaks_two_workers_reaches_no_third() -> None:
    acts = {"d0": counts(2, breaks), "d1": counts(4, breaks), "d2": counts()}
    async with site(1, 3, acts=acts) as here:
        here["d0"].gate.set()
        here["d1"].gate.set()
        assert b"worker_failed" in await stream(here)
        assert not here["d2"].seen


@bounded
async def test_a_draining_worker_gets_no_requests() -> None:
    refusing = refuses(503, "worker_draining", "ask another one")
    async with site(2, 2, acts={"p0": refusing, "d0": refusing}, on_failure="retry") as here:
        # The first request finds it out.
        status, _ = await here.ask()
        assert status == 200
        seen_first = len(here["p0"].seen), len(here["d0"].seen)
        for _ in range(4):
            assert (await here.ask())[0] == 200
        assert (len(here["p0"].seen), len(here["d0"].seen)) == seen_first
        assert max(seen_first) == 1


@bounded
async def test_the_router_drains_a_worker() -> None:
    async with site(1, 2) as here:
        async with here.http.post(f"{here.url}/drain/d0") as response:
            assert response.status == 200
        await here.until_up("d0", up=False)
        assert here["d0"].status == "draining"
        for _ in range(3):
            assert (await here.ask())[0] == 200
        assert not here["d0"].seen
        async with here.http.post(f"{here.url}/drain/nobody") as response:
            assert response.status == 404
