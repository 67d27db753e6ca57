"""Requests from beginning to end: batching, prefixes, stopping, cancelling, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference.driving import (
    ALL,
    PROMPTS,
    Watching,
    ask,
    demand_equal,
    drain,
    engine_of,
    requests,
    small,
    works_of,
)

from kvferry.errors import InputError, Misuse
from kvferry.layout.layout import Parallel
from kvferry.layout.spec import DType
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest, Produced
from kvferry.reference.models.tiny import TinyKind, make_tiny

Models = dict[TinyKind, Path]


def many(number: int) -> list[EngineRequest]:
    """Prompts of different lengths that end at different times."""
    return [
        EngineRequest(
            id=f"m{i}",
            prompt=tuple((7 * i + 31 * j + j * j) % 256 for j in range(3 + 13 * i)),
            max_tokens=4 + i,
            sampling=ALL,
            ignore_end=True,
        )
        for i in range(number)
    ]


@pytest.mark.parametrize("kind", TinyKind)
def test_a_batch_of_eight_equals_eight_single_requests(models: Models, kind: TinyKind) -> None:
    with engine_of(models[kind], prefix_cache=False) as engine:
        together = ask(engine, many(8))
        apart = [ask(engine, [request])[0] for request in many(8)]
    demand_equal(together, apart)
    assert [len(answer.tokens) for answer in together] == [4 + i for i in range(8)]


def test_requests_join_and_leave_a_running_batch(models: Models) -> None:
    """Added one per step, in a cache that can't hold all of them at a time."""
    with engine_of(models[TinyKind.LLAMA], cache_tokens=256, max_requests=5) as engine:
        waited = 0
        outputs: dict[str, list[int]] = {}
        for request in many(8):
            engine.add(request)
            for output in engine.step():
                if isinstance(output, Produced):
                    outputs.setdefault(output.request, []).append(output.sample.token)
            waited = max(waited, len(engine.scheduler.waiting))
        for name, answer in drain(engine).items():
            outputs.setdefault(name, []).extend(answer.tokens)
        assert waited > 0
    with engine_of(models[TinyKind.LLAMA]) as engine:
        alone = ask(engine, many(8))
    assert [outputs[f"m{i}"] for i in range(8)] == [answer.tokens for answer in alone]


def test_decoding_goes_on_while_a_prompt_is_computed(models: Models) -> None:
    short, _, long = requests(max_tokens=20)
    with engine_of(models[TinyKind.LLAMA], extend=Watching, step_tokens=40) as engine:
        engine.add(short)
        engine.step()
        engine.add(long)
        outputs = engine.step()
        # 39 tokens would fit beside the one that decodes; the chunk ends where a page does.
        assert works_of(engine, long.id) == [(0, 32)]
    assert [o.request for o in outputs if isinstance(o, Produced)] == [short.id]


def test_a_repeated_prompt_is_not_computed_again(models: Models) -> None:
    with engine_of(models[TinyKind.QWEN3], extend=Watching) as engine:
        first = ask(engine, requests())
        num_before = len(works_of(engine, "r2"))
        again = ask(engine, requests())
        assert works_of(engine, "r2")[num_before] == (144, 150)
    assert [answer.prefix for answer in first] == [0, 0, 0]
    # Not all of the 32 tokens: the last one has to be computed for its logits.
    assert [answer.prefix for answer in again] == [0, 16, 144]
    demand_equal(first, again)


def test_an_answer_can_be_the_beginning_of_the_next_prompt(models: Models) -> None:
    (_, _, long) = requests(max_tokens=30)
    with engine_of(models[TinyKind.LLAMA]) as engine:
        (answer,) = ask(engine, [long])
        followed = EngineRequest(
            id="next", prompt=(*long.prompt, *answer.tokens, 1, 2), sampling=ALL
        )
        (cached,) = ask(engine, [followed])
    with engine_of(models[TinyKind.LLAMA]) as engine:
        (fresh,) = ask(engine, [followed])
    assert cached.prefix == 176
    assert fresh.prefix == 0
    demand_equal([cached], [fresh])


def test_prefixes_stay_right_when_the_cache_is_too_small_to_keep_them(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], cache_tokens=256) as engine:
        rounds = [ask(engine, many(8)) for _ in range(3)]
    for later in rounds[1:]:
        demand_equal(rounds[0], later)


def test_answers_end_at_max_tokens_or_at_an_end_token(models: Models, tmp_path: Path) -> None:
    prompt = PROMPTS[0]
    with engine_of(models[TinyKind.LLAMA]) as engine:
        (full,) = ask(
            engine, [EngineRequest(id="a", prompt=prompt, max_tokens=12, ignore_end=True)]
        )
        (one,) = ask(engine, [EngineRequest(id="c", prompt=prompt, max_tokens=1)])
    end = {"eos_token_id": full.tokens[2]}
    with engine_of(make_tiny(tmp_path, TinyKind.LLAMA, 7, **end)) as engine:
        (ended,) = ask(engine, [EngineRequest(id="b", prompt=prompt, max_tokens=12)])
    assert (len(full.tokens), full.finish) == (12, "length")
    assert full.text == engine.tokenizer.decode(full.tokens)
    assert (ended.tokens, ended.finish) == (full.tokens[:3], "stop")
    assert ended.text == engine.tokenizer.decode(full.tokens[:2])
    assert (one.tokens, one.finish) == (full.tokens[:1], "length")


def test_a_stop_string_ends_an_answer_and_is_not_shown(models: Models) -> None:
    prompt = PROMPTS[1]
    with engine_of(models[TinyKind.QWEN3]) as engine:
        (full,) = ask(
            engine, [EngineRequest(id="a", prompt=prompt, max_tokens=30, ignore_end=True)]
        )
        at = len(full.text) // 2
        stop = full.text[at : at + 2]
        (cut,) = ask(
            engine,
            [
                EngineRequest(
                    id="b", prompt=prompt, max_tokens=30, ignore_end=True, stop=(stop, "never")
                )
            ],
        )
    assert cut.finish == "stop"
    assert cut.text == full.text[: full.text.find(stop)]
    assert len(cut.tokens) < 30


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_cancelling_frees_everything_at_any_time(models: Models, steps: int) -> None:
    folder = models[TinyKind.LLAMA]
    with engine_of(folder, step_tokens=64) as engine:
        kept, _, cancelled = requests(max_tokens=10)
        engine.add(kept)
        engine.add(cancelled)
        tokens = []
        for _ in range(steps):
            tokens += [o for o in engine.step() if isinstance(o, Produced)]
        assert engine.scheduler.cancel(cancelled.id) is False
        assert engine.scheduler.cancel(cancelled.id) is False
        answers = drain(engine)
        assert cancelled.id not in answers
        assert engine.scheduler.blocks.num_used == 0
        (again,) = ask(engine, [cancelled])
    with engine_of(folder) as engine:
        demand_equal(ask(engine, [cancelled]), [again])


def test_a_request_that_can_never_run_is_refused(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], cache_tokens=64) as engine:
        for fields, words in (
            ({"prompt": ()}, "no tokens"),
            ({"prompt": (1,) * 60}, "are 76 tokens, and the model's context and the cache hold 64"),
            ({"prompt": (1, 257)}, "outside 0..256"),
            ({"prompt": (1, -1)}, "outside 0..256"),
            ({"prompt": (1,), "max_tokens": 0}, "max_tokens"),
            ({"prompt": (1,), "stop": ("",)}, "stop"),
        ):
            with pytest.raises(InputError, match=words):
                engine.add(EngineRequest(id="x", **fields))
        engine.add(EngineRequest(id="x", prompt=(1,)))
        with pytest.raises(InputError, match="known already"):
            engine.add(EngineRequest(id="x", prompt=(1,)))
        with pytest.raises(Misuse, match="no pages"):
            engine.scheduler.release("y")
        drain(engine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_tokens": 20}, "step_tokens=20"),
        ({"device": "tpu"}, "cpu or cuda"),
        ({"dtype": DType.INT8}, "computes in"),
        ({"page": 0}, "page must be above 0"),
        ({"lost_s": 0}, "lost_s must be above 0"),
        ({"parallel": Parallel(tp=2)}, "tp=2"),
        ({"parallel": Parallel(tp=12)}, "6 query heads"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    models: Models, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(models[TinyKind.LLAMA], small(**changes))


def test_an_idle_engine_does_nothing(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA]) as engine:
        assert engine.idle
        assert engine.step() == []
    engine.close()
