"""The arithmetic, against models written down from their definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.driving import ALL, PROMPTS, ask, demand_equal, engine_of, requests
from reference.plain import plain_logprobs

from kvferry.layout.layout import Order
from kvferry.layout.spec import DType
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.decoder import decay_and_add
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
    with engine_of(models[kind], step_tokens=512) as engine:
        whole = ask(engine, requests())
    with engine_of(models[kind], step_tokens=step_tokens, prefix_cache=False) as engine:
        chunked = ask(engine, requests())
    assert [len(answer.chunks) for answer in whole] == [1, 1, 1]
    assert len(chunked[2].chunks) > 2
    demand_equal(whole, chunked)


@pytest.mark.parametrize("kind", TinyKind)
def test_pages_of_any_size_and_order_hold_the_same(models: Models, kind: TinyKind) -> None:
    with engine_of(models[kind]) as engine:
        one = ask(engine, requests())
    with engine_of(models[kind], page_tokens=5, order=Order.HND) as engine:
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


def test_a_state_row_is_reset_for_its_next_request(models: Models) -> None:
    """With one row, the second request gets the row of the first."""
    one, two, _ = requests()
    with engine_of(models[TinyKind.HYBRID], max_requests=1) as engine:
        after_another = ask(engine, [one, two])[1]
    with engine_of(models[TinyKind.HYBRID], max_requests=1) as engine:
        alone = ask(engine, [two])[0]
    demand_equal([after_another], [alone], tolerance=1e-6)


def test_the_recurrence_over_a_chunk_equals_token_by_token() -> None:
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(40, 2, dim, generator=random) for dim in (8, 8, 6))
    # Strong fading: in a product of factors instead of a sum of logarithms it would underflow.
    fading = -30 * torch.rand(40, 2, generator=random)
    state = torch.randn(2, 8, 6, generator=random)
    out, new = decay_and_add(q, k, v, fading, state)
    for t in range(40):
        state = fading[t].exp()[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        assert torch.allclose(out[t], (q[t][:, None, :] @ state)[:, 0], atol=1e-4)
    assert torch.allclose(new, state, atol=1e-4)


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
