"""Which instance the router names, and what it takes from answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from limited import bounded

from kvferry.router.adapters import SglangAdapter, VllmAdapter
from kvferry.router.bodies import ApiCall
from kvferry.router.holders import HolderMemory
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import BalancePolicy, OnFailure, PullOptions, RouterOptions
from kvferry.router.upstream import AttemptOutcome, FailedAttempt, FaultDomain, OpenResponse
from kvferry.router.worker_pool import AnnouncedWorker, Worker, WorkerPool, WorkerRole

PROMPT = list(range(640))


def call_of(prompt: list[int]) -> ApiCall:
    body = {"model": "m", "prompt": prompt}
    return ApiCall("/v1/completions", body, "m", stream=False, on_failure=OnFailure.LOCAL)


class Site:
    """A router's memory, and workers that are up: a prefill of two replicas, another, a decode."""

    def __init__(self, decode: str = "decode-0", adapter: Any = VllmAdapter, **pull: Any) -> None:
        found = [
            AnnouncedWorker(f"http://{number}", role, name)
            for number, (role, name) in enumerate(
                [
                    (WorkerRole.PREFILL, "prefill-0*2"),
                    (WorkerRole.PREFILL, "prefill-1"),
                    (WorkerRole.DECODE, decode),
                ]
            )
        ]
        pool = WorkerPool(BalancePolicy.ROUND_ROBIN, 20.0, found)
        for worker in pool.workers:
            worker.up, worker.name = True, worker.name or worker.url
        self.replicas, self.other, self.decode = pool.workers
        self.metrics = RouterMetrics(pool)
        pulling = PullOptions(fixed_s=0, token_s=0, **pull)
        options = RouterOptions(pull=pulling)
        self.memory = HolderMemory(options, pool, self.metrics, adapter())
        self.pieces = self.memory.pieces_of(call_of(PROMPT))

    def turn(self, prefill: Worker, room: int) -> str:
        return self.memory.choose(self.memory.pieces_of(call_of([*PROMPT, 1])), prefill, room)

    def total(self, name: str) -> dict[str, float]:
        lines = self.metrics.text().decode().splitlines()
        found = [line.partition(" ") for line in lines if line.startswith(f"{name}{{")]
        return {label.split('"')[1]: float(value) for label, _, value in found}


def test_the_worker_that_answered_is_named_then_the_prefill_replica() -> None:
    site = Site()
    site.memory.answered(site.pieces, site.decode, site.replicas, 7, 20)
    assert site.turn(site.other, 8) == "decode-0"
    site.decode.mark_down("gone")
    # Room 7 was that of the second replica.
    assert site.turn(site.other, 8) == "prefill-0-dp1"
    assert site.turn(site.replicas, 8) == "prefill-0-dp1"
    assert site.turn(site.replicas, 9) == ""
    assert site.total("kvferry_router_prefixes_total") == {"pull": 3, "here": 1}


def test_a_worker_without_an_instance_name_is_not_named() -> None:
    """vLLM does not report it, so the router may know only the URL."""
    site = Site(decode="")
    site.memory.answered(site.pieces, site.decode, site.other, 7, 20)
    assert site.turn(site.replicas, 8) == "prefill-1"
    site = Site(decode="")
    site.memory.answered(site.pieces, site.decode, None, 7, 20)
    assert site.turn(site.replicas, 8) == ""


@pytest.mark.parametrize("site", [Site(enabled=False), Site(adapter=SglangAdapter)])
def test_nothing_is_remembered_if_nobody_pulls(site: Site) -> None:
    assert site.pieces == []
    site.memory.answered(site.pieces, site.decode, site.other, 7, 20)
    assert site.turn(site.replicas, 8) == ""
    assert site.total("kvferry_router_prefixes_total") == {}


@bounded
async def test_a_prefill_answer_is_counted_by_where_its_tokens_came_from() -> None:
    site = Site()
    head = b'{"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 80}}, '
    head += b'"kvferry": {"pulled": 48, "pull_s": 0.1}}'
    outcomes: list[AttemptOutcome] = [
        OpenResponse(site.other, cast(Any, None), head),
        OpenResponse(site.other, cast(Any, None), b"not JSON"),
        OpenResponse(site.other, cast(Any, None), b'{"usage": null}'),
        FailedAttempt(site.other, FaultDomain.WORKER, "it failed"),
    ]

    async def answer(outcome: AttemptOutcome) -> AttemptOutcome:
        return outcome

    for outcome in outcomes:
        task = asyncio.create_task(answer(outcome))
        await task
        site.memory.take_prefill(site.pieces, site.other, 7, task)
    cancelled = asyncio.create_task(answer(outcomes[0]))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    site.memory.take_prefill(site.pieces, site.other, 7, cancelled)
    found = site.total("kvferry_router_prompt_tokens_total")
    assert found == {"computed": 20, "cached": 32, "pulled": 48}
