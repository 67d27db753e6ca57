"""The arithmetic, against models written down from their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.driving import (
    ALL,
    PROMPTS,
    Watching,
    ask,
    demand_equal,
    engine_of,
    requests,
    works_of,
)
from reference.plain import plain_logprobs

from kvferry.layout.layout import Order
from kvferry.layout.spec import DType
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]


@pytest.mark.parametrize("kind", TinyKind)
def test_logits_are_those_of_the_definition(models: Models, kind: TinyKind) -> None:
    with engine_of(models[kind]) as engine:
        answers = ask(engine, requests(max_tokens=4))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [*prompt, *answer.tokens[:-1]]
        expected = plain_logprobs(models[kind], tokens)[len(prompt) - 1 :]
        got = torch.tensor([[top[token] for token in range(257)] for top in answer.tops])
        assert (got - expected).abs().max() < 1e-3


@pytest.mark.parametrize("kind", TinyKind)
@pytest.mark.parametrize("step_tokens", [33, 64])
def test_a_prompt_in_chunks_is_the_same_prompt(
    models: Models, kind: TinyKind, step_tokens: int
) -> None:
    with engine_of(models[kind], extend=Watching, step_tokens=512) as engine:
        whole = ask(engine, requests())
        assert works_of(engine)[:3] == [(0, 5), (0, 32), (0, 150)]
    folder = models[kind]
    with engine_of(folder, extend=Watching, step_tokens=step_tokens, prefix_cache=False) as engine:
        chunked = ask(engine, requests())
        assert len([1 for first, end in works_of(engine, "r2") if end <= 150]) > 2
    demand_equal(whole, chunked)


@pytest.mark.parametrize("kind", TinyKind)
def test_pages_of_any_size_and_order_hold_the_same(models: Models, kind: TinyKind) -> None:
    with engine_of(models[kind]) as engine:
        one = ask(engine, requests())
    with engine_of(models[kind], page=5, order=Order.HND) as engine:
        two = ask(engine, requests())
    demand_equal(one, two)


def test_another_precision_stays_near(models: Models) -> None:
    """Not bfloat16: its instructions are missing on some hosts that claim to have them."""
    for kind in TinyKind:
        with engine_of(models[kind]) as engine:
            single = ask(engine, requests())
        with engine_of(models[kind], dtype=DType.FLOAT64) as engine:
            assert engine.ranks.worker.cache.layer("kv", "k", 1).element_size() == 8
            double = ask(engine, requests())
        demand_equal(single, double)


def test_answers_depend_on_every_token_of_the_prompt(models: Models) -> None:
    """Or the equalities in these tests would prove little."""
    prompt = PROMPTS[2]
    changed = [(*prompt[:i], (prompt[i] + 1) % 256, *prompt[i + 1 :]) for i in (0, 75, 149)]
    asked = [
        EngineRequest(id=str(i), prompt=p, max_tokens=12, sampling=ALL)
        for i, p in enumerate([prompt, *changed])
    ]
    for kind in TinyKind:
        with engine_of(models[kind]) as engine:
            first, *others = ask(engine, asked)
        for other in others:
            assert max(abs(first.tops[0][t] - other.tops[0][t]) for t in range(257)) > 0.01
