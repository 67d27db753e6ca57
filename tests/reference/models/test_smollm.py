"""The default model: converted from its package, and speaking."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from reference.driving import ask

from kvferry.errors import InputError
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.find import DEFAULT, default_model
from kvferry.reference.models.smollm import unpermuted
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.options import EngineOptions


def ids(text: str) -> list[int]:
    return [int(number) for number in text.split()]


# Taken once from another implementation of this model and its tokenizer.
CHAT = ids(
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 "
    "198 1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
)
PARIS = ids("504 3575 282 4649 314 7042 30 2")
EXPLAIN = ids("36971 281 216 34 32 34 36 1701 216 33 34 35 36 37 38 39 3247 982 9552 30")
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder; half a gigabyte is not left behind."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_two_that_start_at_once_convert_once(cache: Path) -> None:
    left = cache / f"{DEFAULT}.tmp"
    left.mkdir()
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(default_model, [cache, cache])
    assert one == two == cache / DEFAULT
    assert sorted(p.name for p in cache.iterdir()) == [DEFAULT, f"{DEFAULT}.lock"]
    assert {p.name for p in one.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        default_model(tmp_path / "file" / "cache")


def test_rotation_pairs_are_restored_from_gguf_order() -> None:
    # Two heads of four rows: in GGUF rows 0 and 2 of a head stand beside each other.
    rows = np.arange(8, dtype=np.float32)[:, None]
    interleaved = rows[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert np.array_equal(unpermuted(interleaved, 2), rows)


def test_the_tokenizer_gives_the_tokens_of_the_original(smollm: Path) -> None:
    tokenizer = Tokenizer.load(smollm)
    assert tokenizer.encode("Explain in 2024 why 1234567 isn't prime.") == EXPLAIN
    for text in ("Grüße, 日本 🙂", "  two  spaces\n\n\ttab", "x = [1, 23]  # ok", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.decode([1, 2, 0]) == ""


def test_one_and_three_ranks_give_the_known_answer(smollm: Path) -> None:
    answers = []
    for tp in (1, 3):
        with Engine(smollm, EngineOptions(tp=tp, cache_tokens=512)) as engine:
            prompt = tuple(engine.tokenizer.chat(CAPITAL))
            answers += ask(engine, [EngineRequest(id="q", prompt=prompt, max_tokens=20)])
    for answer in answers:
        assert answer.text == "The capital of France is Paris."
        assert answer.finish == "stop"
    assert list(prompt) == CHAT
    assert answers[0].tokens == answers[1].tokens == PARIS
