"""Failing workers: the client's policy decides, and every request gets a response."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from limited import bounded, bounded_by_idle_time
from router.fakes import (
    MODEL,
    STREAM,
    WORDS,
    Act,
    Body,
    FakeWorker,
    begins_then,
    begins_then_hangs,
    chunk,
    dies,
    hangs,
    loses_the_cache,
    loses_the_cache_once,
    refusal,
    refuses,
    site,
    until,
)

TEXT = "".join(WORDS)
FULL = refuses(503, "overloaded", "the cache is full")
BROKEN = refuses(500, "internal", "a bug")


@pytest.mark.parametrize("act", [dies, FULL, BROKEN])
@pytest.mark.parametrize("stream", [True, False])
@bounded
async def test_retry_uses_another_prefill_worker_and_room(act: Act, stream: bool) -> None:
    async with site(2, 1, acts={"p0": act}, on_failure="retry") as here:
        status, _, data = await here.post({"model": MODEL, "stream": stream})
        assert status == 200
        assert data == STREAM if stream else json.loads(data)["choices"][0]["text"] == TEXT
        first, second = (body["kvferry"] for body in here["d0"].seen)
        assert (first["prefill"], second["prefill"]) == ("p0", "p1")
        assert first["room"] != second["room"]
        # The decode worker was told that nothing will come to the first room.
        assert here["d0"].left == 1
        await here.until_idle()


@bounded
async def test_retry_without_another_prefill_returns_the_reason() -> None:
    async with site(2, 1, acts={"p0": FULL, "p1": dies}, on_failure="retry") as here:
        status, answer = await here.ask()
        assert status in (502, 503)
        assert answer["error"]["type"] == "server_error"
        assert len(here["d0"].seen) == 2
        status, answer = await here.ask(kvferry={"on_failure": "local"})
        assert status == 200


@pytest.mark.parametrize("act", [dies, FULL])
@bounded
async def test_local_lets_decode_compute_the_prompt(act: Act) -> None:
    async with site(2, 1, acts={"p0": act, "p1": act}) as here:
        status, answer = await here.ask()
        assert (status, answer["kvferry"]["source"]) == (200, "local")
        assert len(here["p0"].seen + here["p1"].seen) == 1
        assert "kvferry" not in here["d0"].seen[-1]


@bounded
async def test_the_log_says_why_decode_computes_prompts(caplog: pytest.LogCaptureFixture) -> None:
    async with site(1, 1) as here:
        here["p0"].problem = "rank 1 has ended"
        await here.until_up("p0", up=False)
        status, answer = await here.ask()
        assert (status, answer["kvferry"]["source"]) == (200, "local")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    down, recomputed = warnings
    assert down.endswith("up=False error='rank 1 has ended'")
    assert recomputed == f"no-prefill-worker recomputed-by={here['d0'].url} p0='rank 1 has ended'"


@bounded
async def test_fail_returns_the_reason() -> None:
    async with site(2, 2, acts={"p0": FULL, "p1": FULL}, on_failure="fail") as here:
        status, answer = await here.ask()
        assert (status, answer["error"]["message"]) == (503, "the cache is full")
        assert len(here["p0"].seen + here["p1"].seen) == 1


@bounded
async def test_a_lost_cache_is_retried_at_the_only_prefill_worker() -> None:
    async with site(1, 1, acts={"d0": loses_the_cache_once}, on_failure="retry") as here:
        status, answer = await here.ask()
        assert (status, answer["kvferry"]["source"]) == (200, "transferred")
        rooms = [seen["kvferry"]["room"] for seen in here["p0"].seen]
        assert len(set(rooms)) == 2


@pytest.mark.parametrize(
    ("on_failure", "status", "asked"), [("retry", 503, 3), ("local", 200, 2), ("fail", 503, 1)]
)
@pytest.mark.parametrize("by_header", [True, False])
@bounded
async def test_a_failed_transfer_follows_the_clients_policy(
    on_failure: str, status: int, asked: int, by_header: bool
) -> None:
    default = "fail" if on_failure != "fail" else "retry"
    async with site(2, 1, acts={"d0": loses_the_cache}, on_failure=default) as here:
        body: dict[str, object] = {"model": MODEL}
        headers = {"X-Kvferry-On-Failure": on_failure} if by_header else {}
        if not by_header:
            body["kvferry"] = {"on_failure": on_failure}
        got, _, data = await here.post(body, **headers)
        assert (got, len(here["d0"].seen)) == (status, asked)
        if got == 503:
            error = json.loads(data)["error"]
            assert (error["code"], error["message"]) == ("kv_transfer_failed", "the source is gone")


@pytest.mark.parametrize("act", [dies, FULL, BROKEN])
@bounded
async def test_another_decode_worker_is_tried(act: Act) -> None:
    async with site(1, 2, acts={"d0": act}) as here:
        for _ in range(2):
            status, answer = await here.ask()
            assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        assert len(here["d1"].seen) == 2


@pytest.mark.parametrize("act", [dies, refuses(503, "worker_lost", "rank 1 has ended")])
@bounded
async def test_a_request_is_retried_once_after_lost_workers(act: Act) -> None:
    """A worker that vanishes may have been killed, so one more attempt is made, and no third."""
    acts = dict.fromkeys(("p0", "d0", "d1", "d2"), act)
    async with site(1, 3, acts=acts, attempts=4) as here:
        status, answer = await here.ask()
        assert status in (502, 503)
        assert answer["error"]["type"] in ("server_error", "t")
        assert sum(len(here[name].seen) for name in ("d0", "d1", "d2")) == 2
        assert len(here["p0"].seen) <= 2


@bounded
async def test_a_request_that_broke_a_worker_is_not_retried() -> None:
    broke = refuses(500, "request_broke_worker", "the worker broke")
    for part in ("p0", "d0"):
        async with site(2, 2, acts={part: broke}) as here:
            status, answer = await here.ask()
            while not here[part].seen:
                status, answer = await here.ask()
            assert (status, answer["error"]["code"]) == (500, "request_broke_worker")
            assert len(here[part].seen) == 1


@bounded
async def test_prefills_error_explains_a_failed_transfer() -> None:
    """Decode hears that the room failed before the router hears that prefill broke."""

    async def breaks_later(
        worker: FakeWorker, request: web.Request, body: Body
    ) -> web.StreamResponse:
        worker.wire.room(body["kvferry"]["room"]).set()
        await until(lambda: here["d0"].seen)
        await here["d0"].checked_twice()
        return refusal(500, "request_broke_worker", "the worker broke")

    async with site(1, 1, acts={"p0": breaks_later, "d0": loses_the_cache}) as here:
        status, answer = await here.ask()
        assert (status, answer["error"]["code"]) == (500, "request_broke_worker")
        assert len(here["d0"].seen) == 1


@bounded
async def test_attempts_are_bounded() -> None:
    acts = dict.fromkeys(("d0", "d1", "d2", "d3"), FULL)
    async with site(1, 4, acts=acts, attempts=2) as here:
        status, answer = await here.ask()
        assert (status, answer["error"]["message"]) == (503, "the cache is full")
        assert sum(len(worker.seen) for worker in here.workers.values()) == 4


@pytest.mark.parametrize(
    ("ending", "abort"),
    [(b"", True), (b'data: {"half', True), (b"", False), (b'data: {"half', False)],
)
@bounded
async def test_a_stream_that_breaks_ends_with_an_error(ending: bytes, abort: bool) -> None:
    async with site(acts={"d0": begins_then(ending, abort=abort)}) as here:
        status, _, data = await here.post({"model": MODEL, "stream": True})
        assert status == 200
        assert data.startswith(chunk(WORDS[0]))
        (last,) = data.removeprefix(chunk(WORDS[0])).strip().split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "worker_failed"
        assert len(here["d0"].seen) == 1


@bounded
async def test_a_workers_own_error_event_is_kept() -> None:
    why = b'data: {"error": {"message": "a rank was lost", "code": "x"}}\n\n'
    async with site(acts={"d0": begins_then(why, abort=False)}) as here:
        _, _, data = await here.post({"model": MODEL, "stream": True})
        assert data == chunk(WORDS[0]) + why


# ---------------------------------------------------------------- workers that are slow or silent


@pytest.mark.parametrize("stream", [True, False])
@bounded
async def test_every_request_has_a_deadline(stream: bool) -> None:
    async with site(acts={"d0": hangs}, deadline_s=0.3) as here:
        status, answer = await here.ask(stream=stream)
        assert (status, answer["error"]["code"]) == (504, "deadline")
        await until(lambda: here["d0"].left)
        await here.until_idle()


@bounded
async def test_a_stream_has_a_deadline_too() -> None:
    async with site(acts={"d0": begins_then_hangs}, deadline_s=0.5) as here:
        _, _, data = await here.post({"model": MODEL, "stream": True})
        assert json.loads(data.split(b"data: ")[-1])["error"]["code"] == "deadline"
        await until(lambda: here["d0"].left)


@bounded
async def test_a_slow_prefill_worker_fails_the_attempt() -> None:
    async with site(2, 1, acts={"p0": hangs}, room_s=0.3, on_failure="retry") as here:
        status, _ = await here.ask()
        assert (status, len(here["p1"].seen)) == (200, 1)
        assert here["p0"].left == 1


@bounded_by_idle_time
async def test_a_silent_workers_requests_go_elsewhere() -> None:
    async with site(1, 2, acts={"d0": hangs}, lost_s=0.2) as here:
        asking = asyncio.create_task(here.ask())
        await until(lambda: here["d0"].seen)
        here["d0"].is_silent = True
        status, _ = await asking
        assert (status, len(here["d1"].seen)) == (200, 1)
        await here.until_up("d0", up=False)
        here["d0"].is_silent = False
        await here.until_up("d0")


@bounded
async def test_a_dead_worker_returns_after_restart() -> None:
    async with site(2, 2) as here:
        await here["p0"].stop()
        await here["d0"].stop()
        await here.until_up("p0", "d0", up=False)
        for _ in range(4):
            assert (await here.ask())[0] == 200
        assert not here["p0"].seen + here["d0"].seen
        await here["p0"].start()
        await here["d0"].start()
        await here.until_up("p0", "d0")
        for _ in range(4):
            assert (await here.ask())[0] == 200
        assert len(here["p0"].seen) >= 1
        assert len(here["d0"].seen) >= 1


@bounded
async def test_an_unnoticed_death_costs_one_attempt() -> None:
    """The request itself notices, and the next one does not try again."""
    async with site(2, 2, on_failure="retry") as here:
        await here["p0"].stop()
        await here["d0"].stop()
        for _ in range(3):
            assert (await here.ask())[0] == 200


@bounded
async def test_without_prefill_workers_the_policy_decides() -> None:
    async with site(0, 1) as here:
        status, answer = await here.ask()
        assert (status, answer["kvferry"]["source"]) == (200, "local")
        for on_failure in ("retry", "fail"):
            status, answer = await here.ask(kvferry={"on_failure": on_failure})
            assert (status, answer["error"]["code"]) == (503, "no_prefill_worker")


@bounded
async def test_without_decode_workers_requests_fail() -> None:
    async with site(1, 1) as here:
        await here["d0"].stop()
        await here.until_up("d0", up=False)
        status, answer = await here.ask()
        assert (status, answer["error"]["code"]) == (503, "no_decode_worker")


@bounded
async def test_a_worker_with_another_role_is_not_used() -> None:
    async with site(1, 1) as here:
        here["p0"].role = "decode"
        await here.until_up("p0", up=False)
        assert "it is a decode worker" in (await here.state())["p0"]["problem"]
