"""The fingerprint of a served model: equal for engines that may be joined, else different."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.sglang.settings import model_of
from kvferry.connectors.vllm.engine import fingerprint
from kvferry.fingerprint import difference, rope_form
from kvferry.model_config import model_fingerprint
from kvferry.reference.options import EngineOptions, InstanceOptions
from kvferry.router.worker_pool import WorkerRole

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
OLD: dict[str, Any] = {"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **SCALING}}
NEW: dict[str, Any] = {
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}
}
# The meaning that transformers and SGLang give to the newer words beside them.
BOTH: dict[str, Any] = {
    "rope_theta": None,
    "rope_scaling": {**NEW["rope_parameters"], "type": "llama3", "truncate": None},
    **NEW,
}


def folder_of(where: Path, config: dict[str, Any] = OLD, words: str = "{}") -> Path:
    where.mkdir()
    (where / "config.json").write_text(json.dumps(config))
    (where / "tokenizer.json").write_text(words)
    (where / "model.safetensors").write_bytes(b"weights")
    return where


def made(folder: Path, **changed: Any) -> str:
    its: dict[str, Any] = {"model": folder, "config": OLD, "dtype": "float32", **changed}
    return model_fingerprint(its.pop("model"), its.pop("config"), **its)


def test_rope_is_the_same_in_older_and_newer_words() -> None:
    assert rope_form(OLD) == rope_form(NEW) == rope_form(BOTH)
    assert rope_form({}) == rope_form({"rope_theta": 10000, "rope_scaling": None})
    assert rope_form({}) == rope_form({"rope_parameters": {"rope_theta": 1e4, "type": "default"}})


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 500000},
        {**OLD, "rope_theta": 10000},
        {**OLD, "partial_rotary_factor": 0.5},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", **SCALING}},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **SCALING, "factor": 4}},
        {"rope_parameters": {"full_attention": NEW["rope_parameters"], "sliding_attention": {}}},
    ],
    ids=["unscaled", "base", "part", "kind", "factor", "by kind of layer"],
)
def test_keys_that_were_turned_otherwise_are_told_apart(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path / "m")
    assert rope_form(other) != rope_form(OLD)
    said = difference(made(folder), made(folder, config=other))
    assert said.startswith("rope is llama3,theta:500000,")
    assert said.endswith("serve the same model in the same way on both sides")


def test_each_part_counts_and_is_named(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one")
    same, retokenized = folder_of(tmp_path / "same"), folder_of(tmp_path / "words", words="[]")
    other = folder_of(tmp_path / "other", {**OLD, "hidden_size": 8})
    assert made(one) == made(same)
    changes: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": "bfloat16"},
        "tokenizer": {"tokenizer": retokenized},
        "checkpoint": {"model": other, "tokenizer": one},
        "overrides": {"overrides": {"rms_norm_eps": 1e-3}},
    }
    for part, changed in changes.items():
        said = difference(made(one), made(one, **changed))
        assert said.startswith(f"{part} is ")
        assert " is " not in said.replace(f"{part} is ", "", 1)


def test_rope_that_is_overridden_is_compared_once(tmp_path: Path) -> None:
    """The engine uses the overriding value, wherever it was set."""
    folder = folder_of(tmp_path / "m")
    assert made(folder, overrides=OLD) == made(folder)


def test_names_at_a_hub_and_words_of_the_user_are_parts_too(tmp_path: Path) -> None:
    hub = made(Path("org/model"), model="org/model", revision="v1")
    assert hub.startswith("checkpoint=org/model@v1 tokenizer=org/model@v1 ")
    given = made(folder_of(tmp_path / "m"), given="my model, quantized")
    assert given.startswith("checkpoint=my%20model,%20quantized tokenizer=")
    assert "tokenizer=none" in made(tmp_path, model="org/model", tokenizer=tmp_path)


def test_texts_that_are_not_ours_are_shown_whole() -> None:
    assert difference("llama", "qwen").startswith("prefill serves llama and decode qwen;")
    assert difference("a=1 b=2", "llama").startswith("prefill serves a=1 b=2 and decode llama;")


def own(folder: Path) -> str:
    engine = EngineOptions()
    options = InstanceOptions(
        role=WorkerRole.DECODE, name="d", folder=str(folder), model="m", engine=engine
    )
    assert str(engine.dtype) == "float32"
    return options.fingerprint


def in_vllm(folder: Path, given: str | None = None, **changed: Any) -> str:
    model = SimpleNamespace(
        model=str(folder),
        tokenizer=str(folder),
        revision=None,
        dtype="torch.float32",
        hf_text_config=SimpleNamespace(to_dict=lambda: NEW),
        hf_overrides={},
    )
    vars(model).update(changed)
    return fingerprint(SimpleNamespace(model_config=model), given)


def in_sglang(folder: Path, overrides: str = "{}", given: str | None = None) -> str:
    model = SimpleNamespace(
        model_path=str(folder),
        revision=None,
        dtype="torch.float32",
        hf_text_config=SimpleNamespace(to_dict=lambda: BOTH),
    )
    args = SimpleNamespace(tokenizer_path=str(folder), json_model_override_args=overrides)
    return model_of(model, args, given)


def test_all_engines_say_the_same_of_the_same_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    assert own(folder) == in_vllm(folder) == in_sglang(folder)
    assert in_vllm(folder, given="mine") == in_sglang(folder, given="mine")
    changed = '{"sliding_window": 64}'
    assert in_sglang(folder, changed) == in_vllm(folder, hf_overrides=json.loads(changed))
    assert in_sglang(folder, changed) != in_sglang(folder)
    assert in_vllm(folder, hf_overrides=own) != in_vllm(folder)
