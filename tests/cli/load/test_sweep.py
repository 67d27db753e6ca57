"""The closed loop of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from cli.load.endpoints import counted_stream, event, refusal, served, stream

from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.prompts import FORMS, PromptForm, PromptGenerator, PromptKind
from kvferry.cli.load.sweep import Load, run_sweep
from kvferry.errors import InputError, KvferryError

PAUSE_S = 0.02


class RecordingWatcher:
    def __init__(self) -> None:
        self.levels: list[tuple[int, int]] = []
        self.num_answered = 0

    def level(self, concurrency: int, num_requests: int) -> None:
        self.levels.append((concurrency, num_requests))

    def answered(self, reply: LoadReply) -> None:
        self.num_answered += 1


class Endpoint:
    """A correct endpoint that records its requests; ``problem`` may return an error."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.now = self.most = 0

    def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
        return None

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        problem = self.problem(body, request.path)
        if problem is not None:
            return problem
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            num_tokens = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 3
            portions = counted_stream(num_tokens, body["max_tokens"])
            return await stream(request, *portions, pause_s=PAUSE_S)
        finally:
            self.now -= 1


def load(**fields: Any) -> Load:
    short: dict[str, Any] = {"input_tokens": 12, "output_tokens": 3, "seed": 1}
    return Load(**({"concurrency": (1, 4)} | short | fields))


def test_the_loop_keeps_the_concurrency() -> None:
    endpoint, watching = Endpoint(), RecordingWatcher()
    with served(endpoint) as url:
        sweep = run_sweep(url, load(requests=6), watching)
    assert (sweep.model, sweep.form, sweep.failure) == ("m", "token ids", None)
    assert watching.levels == [(1, 6), (4, 6)]
    assert watching.num_answered == 12
    assert endpoint.most == 4
    one, four = sweep.levels
    assert (one.requests, one.failed, four.requests) == (6, 0, 6)
    assert one.ttft_s is not None
    assert one.tpot_s is not None
    assert one.tpot_s.p50 == pytest.approx(2 * PAUSE_S, rel=2)
    assert one.output_tokens_per_s == pytest.approx(3 * one.requests_per_s)
    # A closed loop of one waits for each answer; four at once take less time in all.
    assert one.seconds >= 6 * 4 * PAUSE_S > four.seconds / 2
    assert (str(one.prompt_tokens), str(one.output_tokens)) == ("12", "3")


def test_no_two_prompts_begin_alike_and_a_seed_repeats_them() -> None:
    runs = []
    for _ in range(2):
        endpoint = Endpoint()
        with served(endpoint) as url:
            run_sweep(url, load(requests=4, extra={"x": 1}, model="mine"), RecordingWatcher())
        runs.append(endpoint.bodies)
    prompts = [tuple(body["prompt"]) for body in runs[0]]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({prompt[:2] for prompt in prompts}) == len(prompts) == 9
    assert sorted(prompts) == sorted(tuple(body["prompt"]) for body in runs[1])
    for body in runs[0]:
        assert (body["model"], body["x"], body["ignore_eos"], body["stream"]) == (
            "mine",
            1,
            True,
            True,
        )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_most_exact_form_that_is_taken_is_found(form: PromptForm) -> None:
    """An endpoint that refuses all forms before this one."""

    class Picky(Endpoint):
        def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
            if form.exact != ("ignore_eos" in body) or path != form.path:
                return refusal("not like this", 404)
            ids = isinstance(body.get("prompt"), list)
            wide = ids and max(body["prompt"]) >= 250
            fits = {
                PromptKind.IDS: wide,
                PromptKind.SMALL_IDS: ids and not wide,
                PromptKind.TEXT: isinstance(body.get("prompt"), str),
                PromptKind.CHAT: "messages" in body,
            }
            return None if fits[form.kind] else refusal("not like this", 400)

    with served(Picky()) as url:
        sweep = run_sweep(url, load(concurrency=(1,), requests=1), RecordingWatcher())
    assert (sweep.form, sweep.failure) == (str(form), None)


def test_a_text_prompt_has_a_word_for_each_token() -> None:
    asker = PromptGenerator("m", 40, 2, seed=3)
    body = asker.body(PromptForm(PromptKind.TEXT, exact=False))
    assert len(body["prompt"].split()) == 40
    assert body["prompt"] != asker.body(PromptForm(PromptKind.TEXT, exact=False))["prompt"]


def test_the_first_refusal_is_reported_if_no_form_is_accepted() -> None:
    class Strict(Endpoint):
        def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
            return refusal(f"no {path}")

    endpoint = Strict()
    with (
        served(endpoint) as url,
        pytest.raises(InputError, match="the warm-up request failed: no /v1/completions"),
    ):
        run_sweep(url, load(), RecordingWatcher())
    assert len(endpoint.bodies) == len(FORMS)


@pytest.mark.parametrize(("status", "kind"), [(401, InputError), (500, KvferryError)])
def test_final_refusals_end_the_warm_up(status: int, kind: type[Exception]) -> None:
    class Closed(Endpoint):
        def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
            return refusal("closed", status)

    endpoint = Closed()
    with served(endpoint) as url, pytest.raises(kind, match="closed") as raised:
        run_sweep(url, load(), RecordingWatcher())
    assert isinstance(raised.value, InputError) == (kind is InputError)
    assert len(endpoint.bodies) == 1


def test_failures_are_counted_with_the_first_reason() -> None:
    class Flaky(Endpoint):
        def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
            number = len(self.bodies)
            return refusal(f"number {number}", 503) if number in (4, 6) else None

    with served(Flaky()) as url:
        sweep = run_sweep(url, load(concurrency=(1, 2), requests=8), RecordingWatcher())
    assert [(level.requests, level.failed) for level in sweep.levels] == [(8, 2), (8, 0)]
    assert sweep.levels[0].first_failure == "number 4"
    assert sweep.failure == "2 of 16 requests failed; the first: number 4"


def test_a_dead_endpoint_ends_the_sweep() -> None:
    class Dying(Endpoint):
        def problem(self, body: dict[str, Any], path: str) -> web.Response | None:
            return refusal("gone", 503) if len(self.bodies) > 1 else None

    endpoint = Dying()
    with served(endpoint) as url:
        sweep = run_sweep(url, load(concurrency=(3, 8, 16), requests=100), RecordingWatcher())
    assert [level.concurrency for level in sweep.levels] == [3]
    assert sweep.levels[0].failed == sweep.levels[0].requests <= 5
    assert sweep.failure is not None


def test_an_answer_without_text_is_a_failure() -> None:
    async def empty(request: web.Request) -> web.StreamResponse:
        last = event({"choices": [{"text": "", "finish_reason": "stop"}]})
        return await stream(request, last, b"data: [DONE]\n\n")

    with served(empty) as url, pytest.raises(KvferryError, match="the answer is empty"):
        run_sweep(url, load(), RecordingWatcher())


def test_a_hanging_request_ends_at_its_deadline() -> None:
    class Slow(Endpoint):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            if self.bodies:
                await asyncio.Event().wait()
            return await super().__call__(request)

    with served(Slow()) as url:
        sweep = run_sweep(url, load(concurrency=(2,), deadline_s=0.5), RecordingWatcher())
    (level,) = sweep.levels
    assert level.failed == level.requests <= 3
    assert level.first_failure == "no complete answer within 0.5 s"


def test_number_of_requests() -> None:
    assert [load().num_requests(n) for n in (1, 2, 4)] == [8, 8, 16]
    assert [load(requests=3).num_requests(n) for n in (1, 4)] == [3, 4]
