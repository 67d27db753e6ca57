"""Model folders: what is read, what is refused, and what layout follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from reference.driving import engine_of
from safetensors.torch import load_file, save_file

from kvferry.errors import InputError
from kvferry.layout.hf import spec_from_config
from kvferry.layout.layout import Order
from kvferry.layout.spec import DType
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.tiny import TinyKind, make_tiny, tiny_config
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.options import EngineOptions
from kvferry.reference.ranks.rank import Extension

Models = dict[TinyKind, Path]


def write(folder: Path, **changes: object) -> Path:
    config = tiny_config(TinyKind.LLAMA) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
        ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
        ({"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.load(write(tmp_path, **changes))


def test_missing_files_are_one_sentence(tmp_path: Path, models: Models) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        ModelConfig.load(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer\.json can't be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="can't be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="can't be used"):
        ModelConfig.load(tmp_path)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path, models: Models) -> None:
    folder = shutil.copytree(models[TinyKind.LLAMA], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.3\.mlp\.up_proj"):
        engine_of(folder)


def test_newer_configs_keep_the_rotation_elsewhere(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert ModelConfig.load(write(tmp_path, **changes)).rope_theta == 5e5


def test_chat_models_have_more_than_one_end(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[7, 8])
    assert ModelConfig.load(tmp_path).end_tokens == (7, 8)


@pytest.mark.parametrize("kind", [TinyKind.LLAMA, TinyKind.QWEN3])
def test_the_cache_is_what_the_published_config_says(models: Models, kind: TinyKind) -> None:
    raw = json.loads((models[kind] / "config.json").read_text())
    mine = ModelConfig.load(models[kind]).cache(DType.FLOAT32)
    assert mine == spec_from_config(raw, dtype=DType.FLOAT32)


@pytest.mark.parametrize("order", Order)
def test_views_of_the_cache_are_where_its_map_says(models: Models, order: Order) -> None:
    """Write through each view; find it at base + page, token and unit strides."""
    config = ModelConfig.load(models[TinyKind.LLAMA])
    layout = EngineOptions(tp=3, page=8, order=order).layout(config)
    cache = RankCache(layout, 1, 5, torch.device("cpu"), Extension(1).allocate)
    floats = cache.memory.view(torch.float32)
    value = 0.0
    for placement in cache.pools.map.placements:
        for base in placement.bases:
            view = cache.layer(placement.group, placement.tensor, base.layer)
            value += 1
            view[4, 7, 0] = value
            at = base.offset + 4 * placement.page_stride + 7 * placement.token_stride
            assert (floats == value).sum() == view.shape[-1]
            assert float(floats[at // 4]) == value
    assert value == 6 * 2


def test_a_seed_makes_the_same_model_again(tmp_path: Path) -> None:
    files = [
        (make_tiny(tmp_path / str(i), TinyKind.QWEN3, seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((1, 1, 2))
    ]
    assert files[0] == files[1] != files[2]
