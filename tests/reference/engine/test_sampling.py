"""Chance that belongs to a seed and a position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from reference.driving import PROMPTS, ask, engine_of, requests

from kvferry.errors import InputError
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import (
    EngineRequest,
    Produced,
    RequestWork,
    Sample,
    SampleFailed,
    Sampling,
    StepPlan,
)
from kvferry.reference.engine.sampling import draw, sample
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.ranks.rank import Extension

Models = dict[TinyKind, Path]
LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def work(sampling: Sampling) -> RequestWork:
    return RequestWork(request="r", tokens=[1], first=9, pages=[0], sampling=sampling)


def only_sample(work: RequestWork) -> Sample:
    (chosen,) = sample(LOGITS[None], [work])
    return chosen


def test_frequencies_are_the_probabilities() -> None:
    drawn = Counter(draw(LOGITS, Sampling(temperature=1, seed=5), at) for at in range(4000))
    for token, probability in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert abs(drawn[token] / 4000 - probability) < 0.03


def test_top_p_keeps_as_few_as_reach_it() -> None:
    for top_p, kept in ((0.3, {3}), (0.41, {3, 2}), (0.7, {3, 2}), (0.71, {3, 2, 1})):
        sampling = Sampling(temperature=1, top_p=top_p, seed=1)
        assert {draw(LOGITS, sampling, at) for at in range(300)} == kept


def test_temperature_sharpens() -> None:
    cold = [draw(LOGITS, Sampling(temperature=0.05), at) for at in range(200)]
    assert Counter(cold)[3] > 190


@pytest.mark.parametrize("temperature", [1e-320, 1e-200, 1e-6, 1e-5, 1e-3])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float) -> None:
    logits = 1e4 * torch.tensor([-1.0, 0.5, 1.0, 0.9])
    (told,) = sample(logits[None], [work(Sampling(temperature=temperature))])
    assert told.token == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_request_alone(bad: float) -> None:
    broken = torch.tensor([0.1, bad, 0.3, 0.4])
    works = [msgspec.structs.replace(work(Sampling()), request=name) for name in ("a", "b", "c")]
    samples = sample(torch.stack([LOGITS, broken, LOGITS]), works)
    assert [told.request for told in samples] == ["a", "c"]


class NotFinite(Extension):
    """Fills the cache with NaN under the second chunk of the request "bad"."""

    def start(self, cache: RankCache) -> None:
        self._memory = cache.memory

    def before(self, plan: StepPlan) -> None:
        if any(work.request == "bad" and work.first for work in plan.works):
            self._memory.fill_(0xFF)

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        if any(work.sampling for work in plan.works) and not samples:
            self._memory.zero_()
        return []


def test_an_engine_drops_a_request_that_cannot_be_sampled_and_goes_on(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], extend=NotFinite) as engine:
        engine.add(EngineRequest(id="bad", prompt=PROMPTS[2], max_tokens=4))
        outputs = [*engine.step(), *engine.step()]
        (failure,) = (output for output in outputs if isinstance(output, SampleFailed))
        assert failure.request == "bad"
        assert engine.idle
        assert not engine.scheduler.blocks.num_used
        engine.add(EngineRequest(id="good", prompt=PROMPTS[0], max_tokens=1))
        assert any(isinstance(output, Produced) for output in engine.step())


def test_draws_depend_on_the_position_and_the_seed() -> None:
    even = torch.zeros(4096)
    cases = [(seed, position) for seed in range(-5, 5) for position in range(30)]
    drawn = [draw(even, Sampling(temperature=1, seed=seed), at) for seed, at in cases]
    assert drawn == [draw(even, Sampling(temperature=1, seed=seed), at) for seed, at in cases]
    # Of 300 independent draws, 289 are expected to differ.
    assert len(set(drawn)) > 270


def test_logprobs_come_when_they_are_asked_for() -> None:
    plain = only_sample(work(Sampling()))
    assert (plain.token, plain.top) == (3, {})
    told = only_sample(work(Sampling(logprobs=2)))
    assert told.top == pytest.approx({3: float(LOGITS[3]), 2: float(LOGITS[2])})


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"seed": 1 << 63},
    ],
)
def test_sampling_values_out_of_range_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(field))):
        Sampling(**field)


def test_a_seed_gives_the_same_answer_alone_and_in_company(models: Models) -> None:
    hot = Sampling(temperature=1.5, seed=11)
    with engine_of(models[TinyKind.LLAMA], prefix_cache=False) as engine:
        first = ask(engine, requests(sampling=hot))
        alone = [ask(engine, [request])[0] for request in requests(sampling=hot)]
        other = ask(engine, requests(sampling=Sampling(temperature=1.5, seed=12)))
        greedy = ask(engine, requests(sampling=Sampling()))
    assert [a.tokens for a in first] == [a.tokens for a in alone]
    for answer, *different in zip(first, other, greedy, strict=True):
        assert all(answer.tokens != d.tokens for d in different)
