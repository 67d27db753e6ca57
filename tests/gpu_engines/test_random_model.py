"""The model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

from gpu_engines.model import VOCABULARY, ModelSize, write_model
from safetensors import safe_open
from tokenizers import Tokenizer

SIZE = ModelSize(layers=2, heads=4, kv_heads=2, hidden=64, intermediate=96)


def test_weights_fit_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, SIZE)
    config = json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", "numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    first = "model.layers.1.self_attn"
    assert shapes[f"{first}.q_proj.weight"] == [config["num_attention_heads"] * 128, 64]
    assert shapes[f"{first}.k_proj.weight"] == [config["num_key_value_heads"] * 128, 64]
    assert shapes["lm_head.weight"] == [VOCABULARY, 64]
    assert len(shapes) == 3 + 9 * config["num_hidden_layers"]


def test_words_are_tokens(tmp_path: Path) -> None:
    write_model(tmp_path, SIZE)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("w3 w4095").ids == [3, 4095]
