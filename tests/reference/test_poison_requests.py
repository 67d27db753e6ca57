"""Requests that break a worker: one request ends at most one worker, and bystanders go on.

Real workers and a real router. The fault is injected through the extension that every rank
has: a step with the poisoned prompt raises in ``before``, on prefill or on decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from reference.driving import PROMPTS
from reference.working import Alone, Caller, Worker, body_of, call, hosted, options_for

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Parallel
from kvferry.reference.engine.requests import StepPlan
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.options import InstanceOptions
from kvferry.reference.ranks.rank import MakeExtension
from kvferry.reference.transfer.extensions import PrefillExtension, RoomExtension
from kvferry.reference.worker.instance import extension_for
from kvferry.router.options import OnFailure, RouterOptions
from kvferry.router.serving import serving
from kvferry.router.worker_pool import WorkerRole

Models = dict[TinyKind, Path]
POISON = 251
POISONED = (7, POISON, 7, 9)
ONE = Parallel()


def demand_harmless(plan: StepPlan) -> None:
    for work in plan.works:
        # The prompt's tokens, or the first one that decode runs after them.
        if POISON in work.tokens or work.first == len(POISONED):
            raise ValueError("this step was told to fail")


class BreakingPrefill(PrefillExtension):
    def before(self, plan: StepPlan) -> None:
        demand_harmless(plan)
        super().before(plan)


class BreakingDecode(RoomExtension):
    def before(self, plan: StepPlan) -> None:
        demand_harmless(plan)
        super().before(plan)


def breaking(options: InstanceOptions) -> MakeExtension:
    made = extension_for(options)
    assert isinstance(made, partial)
    kind = BreakingPrefill if options.role is WorkerRole.PREFILL else BreakingDecode
    return partial(kind, *made.args)


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture
def workers(
    models: Models, discovery: str, request: pytest.FixtureRequest
) -> Iterator[list[Worker]]:
    """A prefill worker and two decode workers, of which one side breaks on the poison."""
    options = [
        options_for(role, models[TinyKind.LLAMA], discovery, ONE)
        for role in ("prefill", "decode", "decode")
    ]
    extensions = {one.name: breaking(one) for one in options if one.role in request.param}
    with hosted(*options, extend=extensions) as running:
        yield running


def router_for(workers: Sequence[Worker], on_failure: OnFailure = OnFailure.LOCAL) -> RouterOptions:
    prefill, *decodes = (worker.url for worker in workers)
    return RouterOptions(
        port=0,
        poll_s=0.05,
        prefill_urls=(prefill,),
        decode_urls=tuple(decodes),
        on_failure=on_failure,
    )


async def ask(url: str, prompt: Sequence[int], **fields: Any) -> tuple[int, Any]:
    body = body_of(tuple(prompt)) | fields
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        return response.status, await response.json()


def num_ended(workers: Sequence[Worker]) -> int:
    return sum(worker.service is not None and worker.service.died.done() for worker in workers)


@pytest.mark.parametrize("workers", [["prefill", "decode"], ["decode"]], indirect=True)
@pytest.mark.parametrize("on_failure", [OnFailure.LOCAL, OnFailure.RETRY])
def test_a_request_that_broke_one_worker_is_not_tried_on_another(
    workers: list[Worker], on_failure: OnFailure, models: Models
) -> None:
    given = router_for(workers, on_failure)

    async def attack(caller: Caller) -> None:
        async with serving(given) as url:
            await caller.until(url, lambda told: all(one["up"] for one in told["workers"]))
            status, answer = await ask(url, POISONED)
            assert (status, answer["error"]["code"]) == (500, "request_broke_worker"), answer
            assert num_ended(workers) == 1
            # Whoever asks now is answered by those that are left.
            status, answer = await ask(url, PROMPTS[1], kvferry={"on_failure": "local"})
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected
            assert num_ended(workers) == 1

    (expected,) = Alone(models)(TinyKind.LLAMA, [PROMPTS[1]])
    call(attack)


@pytest.mark.parametrize("workers", [[]], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-320},
        {"temperature": 1e-5, "top_p": 0},
        {"temperature": 3},
    ],
)
def test_extreme_sampling_parameters_do_not_end_a_worker(
    workers: list[Worker], fields: dict[str, float]
) -> None:
    given = router_for(workers)

    async def attack(caller: Caller) -> None:
        async with serving(given) as url:
            await caller.until(url, lambda told: all(one["up"] for one in told["workers"]))
            status, answer = await ask(url, PROMPTS[0], **fields)
            if fields["temperature"] > 2:
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
                assert "temperature must be from 0 to 2" in answer["error"]["message"]
            else:
                assert status == 200, answer
            assert num_ended(workers) == 0

    call(attack)
