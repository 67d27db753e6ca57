"""Tests that bad configs are refused with a sentence, and that none raises anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from configs import CONFIGS, Json, config, without
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError, ReasonCode, Refused
from kvferry.layout.hf import FAMILIES, spec_from_config
from kvferry.layout.hf_fields import DEFAULTS
from kvferry.layout.spec import DType


def refusal(made: Json) -> tuple[ReasonCode, str]:
    with pytest.raises(Refused) as refused:
        spec_from_config(made)
    (reason,) = refused.value.reasons
    return reason.code, reason.message


@pytest.mark.parametrize(
    "made",
    [
        {"model_type": "rwkv9", "num_hidden_layers": 2},
        {"model_type": "rwkv9", "architectures": ["Rwkv9ForCausalLM", 7, None]},
        {"model_type": "rwkv9", "architectures": "LlamaForCausalLM"},
        {"text_config": {"model_type": "rwkv9"}, "model_type": "rwkv9_vl"},
    ],
)
def test_unknown_architecture(made: Json) -> None:
    code, message = refusal(made)
    assert code is ReasonCode.UNKNOWN_ARCHITECTURE
    assert "'rwkv9'" in message
    assert "--layers --kv-heads --head-dim" in message
    assert "CacheSpec" in message
    assert "DeepSeek" in message


@pytest.mark.parametrize("made", [{}, {"model_type": None}, {"model_type": 7}, {"model_type": []}])
def test_nameless_architecture(made: Json) -> None:
    assert refusal(made)[0] is ReasonCode.UNKNOWN_ARCHITECTURE


def test_no_kv_heads() -> None:
    assert refusal(config("llama-3.1-8b", num_key_value_heads=0))[0] is ReasonCode.NO_UNITS


WRONG_NUMBERS = ["32", True, 32.0, -1, 10**12, 10**5000, [32], {"n": 32}]


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "hidden_size"])
def test_wrong_numbers(field: str, value: object) -> None:
    code, message = refusal(config("llama-3.1-8b", **{field: value}))
    assert code is ReasonCode.BAD_CONFIG
    assert repr(field) in message
    assert "describe the cache by hand" in message


REQUIRED = {
    "llama-3.1-8b": ["num_hidden_layers", "num_attention_heads", "hidden_size"],
    "qwen3-8b": ["num_key_value_heads"],
    "gemma-3-27b": ["num_hidden_layers", "sliding_window"],
    "gpt-oss-20b": ["sliding_window"],
    "deepseek-v3": ["kv_lora_rank", "qk_rope_head_dim"],
    "deepseek-v3.2": ["index_head_dim"],
    "bamba-9b": ["attn_layer_indices", "mamba_n_heads", "mamba_n_groups", "mamba_d_state"],
    "granite-4.0-h-small": ["layer_types"],
    "nemotron-h-8b": ["mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"],
    "jamba-mini": ["hidden_size"],
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in REQUIRED.items() for field in fields]
)
def test_missing_fields(name: str, field: str) -> None:
    code, message = refusal(without(name, field))
    assert code is ReasonCode.BAD_CONFIG
    assert repr(field) in message


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama-3.1-8b", {"hidden_size": 4097}, "'hidden_size'"),
        ("llama-3.1-8b", {"num_attention_heads": 0}, "'num_attention_heads'"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "'num_key_value_heads'"),
        ("llama-3.1-8b", {"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ("llama-3.1-8b", {"num_hidden_layers": 4097}, "'num_hidden_layers'"),
        ("llama-3.1-8b", {"head_dim": 0}, "'head_dim'"),
        ("llama-3.1-8b", {"torch_dtype": "float3"}, "'torch_dtype'"),
        ("llama-3.1-8b", {"torch_dtype": 16}, "'torch_dtype'"),
        ("llama-3.1-8b", {"text_config": 5}, "'text_config'"),
        ("llama-3.1-8b", {"layer_types": ["sliding_attention"] * 32}, "'sliding_attention'"),
        ("qwen3-8b", {"use_sliding_window": "yes"}, "'use_sliding_window'"),
        ("gpt-oss-20b", {"sliding_window": 0}, "'sliding_window'"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "1 entries"),
        ("gpt-oss-20b", {"layer_types": "full_attention"}, "'layer_types'"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23 + ["wavy"]}, "'wavy'"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23 + [[]]}, "'layer_types'"),
        ("gpt-oss-20b", {"layer_types": ["mamba"] * 24}, "'mamba'"),
        ("gemma-3-27b", {"sliding_window_pattern": 0}, "'sliding_window_pattern'"),
        ("deepseek-v3.2", {"layer_types": ["indexed_attention"]}, "1 entries"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "'linear_num_value_heads'"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 0}, "'linear_num_key_heads'"),
        ("qwen3-next-80b-a3b", {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim'"),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, "'full_attention_interval'"),
        ("qwen3.5-35b-a3b", {"mamba_ssm_dtype": "wide"}, "'mamba_ssm_dtype'"),
        ("bamba-9b", {"attn_layer_indices": [32]}, "'attn_layer_indices'"),
        ("bamba-9b", {"attn_layer_indices": [True]}, "'attn_layer_indices'"),
        ("bamba-9b", {"attn_layer_indices": 9}, "'attn_layer_indices'"),
        ("bamba-9b", {"mamba_d_head": 65}, "'mamba_n_heads'"),
        ("bamba-9b", {"mamba_d_head": "auto", "mamba_n_heads": 127}, "'mamba_n_heads'"),
        ("bamba-9b", {"mamba_n_groups": 3}, "'mamba_n_groups'"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M" * 51 + "?"}, "'?'"),
        ("nemotron-h-8b", {"hybrid_override_pattern": 52}, "'hybrid_override_pattern'"),
        ("jamba-mini", {"attn_layer_offset": 8}, "'attn_layer_offset'"),
        ("jamba-mini", {"attn_layer_period": 0}, "'attn_layer_period'"),
    ],
)
def test_fields_that_do_not_fit(name: str, changes: Json, said: str) -> None:
    code, message = refusal(config(name, **changes))
    assert code is ReasonCode.BAD_CONFIG
    assert said in message


def test_state_that_is_too_large_is_refused() -> None:
    made = config("qwen3-next-80b-a3b", linear_key_head_dim=1 << 20, linear_value_head_dim=1 << 20)
    assert refusal(made)[0] is ReasonCode.TOO_LARGE


def test_a_huge_number_is_not_printed() -> None:
    _, message = refusal(config("llama-3.1-8b", num_hidden_layers=10**5000))
    assert len(message) < 300


# --- arbitrary configs ------------------------------------------------------

NUMBERS = st.one_of(st.integers(), st.integers(-2, 64), st.floats(), st.booleans(), st.none())
LAYER_NAMES = st.sampled_from(["full_attention", "sliding_attention", "mamba", "moe", "M", "*"])
JSON = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=8), LAYER_NAMES, st.sampled_from(["auto", "float16"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = sorted(
    {field for made in CONFIGS.values() for field in made.get("text_config", made)}
    | {field for defaults in DEFAULTS.values() for field in defaults}
    | {"use_sliding_window", "mamba_ssm_dtype", "mamba_head_dim", "index_head_dim", "dtype"}
)


@st.composite
def mutated(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Json:
    """Return a published config with fields dropped and values replaced."""
    made = config(draw(st.sampled_from(sorted(CONFIGS))))
    if draw(st.booleans()):
        made.get("text_config", made)["model_type"] = draw(st.sampled_from(sorted(FAMILIES)))
    for part in [made, made.get("text_config", {})]:
        for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
            part.pop(field, None)
        part.update(draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)))
    if draw(st.integers(0, 9)) == 0:
        made["text_config"] = draw(JSON)
    return made


def outcome(made: Json, dtype: DType | None) -> int | str:
    """Return the bytes of a request, or the message of the refusal."""
    try:
        return spec_from_config(made, dtype).payload_bytes(100)
    except (Refused, InputError) as error:
        return str(error)


@given(mutated(), st.none() | st.sampled_from(DType))
def test_any_config_gives_a_spec_or_a_refusal(made: Json, dtype: DType | None) -> None:
    assert outcome(made, dtype)


@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(FIELDS), JSON, max_size=8))
def test_any_object_gives_a_spec_or_a_refusal(made: Json) -> None:
    assert outcome(made, None)
