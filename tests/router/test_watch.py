"""When the worker watch marks a worker down, in simulated time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from limited import bounded
from router.fakes import MODEL, site

from kvferry.router.options import BalancePolicy, RouterOptions
from kvferry.router.watch import WorkerWatch
from kvferry.router.worker_pool import AnnouncedWorker, Worker, WorkerHealth, WorkerPool, WorkerRole

URL = "http://127.0.0.1:1"


class Hurried(selectors.DefaultSelector):
    """Waits for nothing: the time that it should have waited has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop in which hours pass at once."""

    def __init__(self) -> None:
        self.urgent = Hurried()
        super().__init__(self.urgent)

    def time(self) -> float:
        return self.urgent.now


def urgent(trace: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        runner.run(trace())


class Mute:
    """A worker that answers until ``silent_since`` is set."""

    def __init__(self) -> None:
        self.silent_since: float | None = None

    async def __call__(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> WorkerHealth:
        if self.silent_since is not None:
            await asyncio.Event().wait()
        return WorkerHealth("decode", "d0", MODEL)


async def falls_silent(options: RouterOptions, at: float) -> tuple[float, float]:
    """Seconds from a worker's falling silent until it is left out, and until it is lost."""
    pool, worker = (
        WorkerPool(
            BalancePolicy.ROUND_ROBIN, options.lost_s, [AnnouncedWorker(URL, WorkerRole.DECODE)]
        ),
        Mute(),
    )
    watching = asyncio.create_task(WorkerWatch(options, pool, None, None, worker).run())
    (known,) = pool.workers
    await asyncio.sleep(at)
    assert known.up
    worker.silent_since = at
    left_out = await seconds_until(lambda: not known.up)
    lost = left_out + await seconds_until(known.lost.is_set)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return left_out, lost


async def seconds_until(holds: Callable[[], bool]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not holds():
        await asyncio.sleep(0.01)
    return loop.time() - began


@pytest.mark.parametrize("poll_s", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("phase", [0.01, 0.3, 0.99])
def test_two_missed_checks_take_the_promised_time(poll_s: float, phase: float) -> None:
    """Whenever it falls silent between two checks; and what it was asked ends by ``lost_s``."""
    options = RouterOptions(poll_s=poll_s, lost_s=20)

    async def trace() -> None:
        left_out, lost = await falls_silent(options, at=(10 + phase) * poll_s)
        assert 2 * options.check_s <= left_out <= options.left_out_s + 0.1
        assert lost <= options.lost_s + 0.1

    urgent(trace)


def test_docs_state_the_promised_time() -> None:
    assert RouterOptions().left_out_s == 5


@bounded
async def test_an_unhealthy_worker_is_marked_down_at_once() -> None:
    async with site(1, 1) as here:
        here["d0"].problem = "rank 1 has shown no sign of life for 10 s"
        await here.until_up("d0", up=False)
        assert (await here.state())["d0"]["problem"] == "rank 1 has shown no sign of life for 10 s"
        here["d0"].problem = ""
        await here.until_up("d0")


def test_one_unhealthy_report_is_enough() -> None:
    """Where two misses would be, if it had merely been slow."""
    for sure in (True, False):
        pool = WorkerPool(BalancePolicy.ROUND_ROBIN, 20, [AnnouncedWorker(URL, WorkerRole.DECODE)])
        (worker,) = pool.workers
        pool.mark_up(worker, WorkerHealth("decode", "d0", MODEL), 0.0)
        pool.mark_missed(worker, "it is not well", 1.0, sure=sure)
        assert worker.up is not sure
        assert not worker.lost.is_set()
