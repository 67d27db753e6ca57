"""Back-pressure: full workers, requests that wait for them, and status 429."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from limited import bounded
from router.fakes import MODEL, Site, decodes_later, refuses, site, until

FULL = refuses(429, "worker_full")


@asynccontextmanager
async def one_at_a_time(**options: Any) -> AsyncIterator[Site]:
    """A prefill worker and a decode worker that takes one request and answers at its gate."""
    async with site(acts={"d0": decodes_later}, **options) as here:
        here["d0"].limits = {"max_in_flight": 1}
        await here["d0"].checked_twice()
        yield here


async def asked(here: Site) -> asyncio.Task[tuple[int, Any]]:
    """Begin a request; return once it is at decode or waits."""
    before = len(here["d0"].seen) + await queued(here)
    task = asyncio.create_task(here.ask())
    while len(here["d0"].seen) + await queued(here) == before and not task.done():
        await asyncio.sleep(0.01)
    return task


async def queued(here: Site) -> int:
    async with here.http.get(f"{here.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("kvferry_router_queued ")]
    return int(float(line.split()[1]))


@bounded
async def test_a_full_decode_worker_is_passed_over() -> None:
    async with site(1, 2, acts={"d0": FULL}, attempts=1) as here:
        for _ in range(3):
            status, answer = await here.ask()
            assert (status, answer["kvferry"]) == (200, {"source": "transferred"})
        assert len(here["d1"].seen) == 3


@bounded
async def test_a_full_prefill_worker_is_passed_over() -> None:
    async with site(2, 1, acts={"p0": FULL}, attempts=1) as here:
        for _ in range(3):
            status, answer = await here.ask()
            assert (status, answer["kvferry"]) == (200, {"source": "transferred"})
        assert len(here["p1"].seen) == 3


@bounded
async def test_requests_wait_in_turn_and_prefill_computes_for_none_of_them() -> None:
    async with one_at_a_time() as here:
        tasks = [await asked(here) for _ in range(3)]
        assert await queued(here) == 2
        assert (len(here["p0"].seen), len(here["d0"].seen)) == (1, 1)
        here["d0"].gate.set()
        assert [(await task)[0] for task in tasks] == [200] * 3
        assert (len(here["p0"].seen), await queued(here)) == (3, 0)


@bounded
async def test_a_request_beyond_the_queue_is_refused_at_once() -> None:
    async with one_at_a_time(max_queued=1) as here:
        tasks = [await asked(here) for _ in range(2)]
        body = {"model": MODEL, "prompt": "p", "stream": True}
        status, headers, data = await here.post(body)
        assert (status, json.loads(data)["error"]["code"]) == (429, "overloaded")
        assert 1 <= int(headers["Retry-After"]) <= 60
        here["d0"].gate.set()
        assert [(await task)[0] for task in tasks] == [200, 200]


@bounded
async def test_a_request_waits_for_queue_s_at_most() -> None:
    async with one_at_a_time(queue_s=0.1) as here:
        first = await asked(here)
        status, answer = await here.ask()
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert "0 requests wait" in answer["error"]["message"]
        here["d0"].gate.set()
        assert (await first)[0] == 200


@bounded
async def test_a_worker_that_stays_full_ends_in_429() -> None:
    """Other routers may have filled it, so that its own answer is the first sign."""
    async with site(acts={"d0": FULL}, queue_s=0.3) as here:
        status, answer = await here.ask()
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert not any(worker["in_flight"] for worker in (await here.state()).values())


@bounded
async def test_a_client_that_leaves_makes_room_in_the_queue() -> None:
    async with one_at_a_time(max_queued=1) as here:
        first, waiting = await asked(here), await asked(here)
        waiting.cancel()
        while await queued(here):
            await asyncio.sleep(0.01)
        again = await asked(here)
        assert await queued(here) == 1
        here["d0"].gate.set()
        assert [(await task)[0] for task in (first, again)] == [200, 200]


@bounded
async def test_waiting_requests_learn_that_no_worker_is_left() -> None:
    async with one_at_a_time(lost_s=0.5) as here:
        first, second = await asked(here), await asked(here)
        await here["d0"].stop()
        statuses = {(await task)[0] for task in (first, second)}
        assert statuses <= {502, 503}


@bounded
async def test_a_restored_worker_serves_those_that_wait() -> None:
    async with site(acts={"d0": FULL}) as here:
        task = asyncio.create_task(here.ask())
        await until(lambda: len(here["d0"].seen) > 1)
        here["d0"].act = decodes_later
        here["d0"].gate.set()
        assert (await task)[0] == 200
