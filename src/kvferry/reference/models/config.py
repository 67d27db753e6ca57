"""A model's configuration: what a Hugging Face folder says of it, if this engine can run it.

Two published families, Llama and dense Qwen3, and one of our own: a hybrid in
which gated linear-attention layers stand between attention layers. What the
engine would compute wrongly (another activation, biases, other rotary scaling,
a sliding window) is refused here, with one sentence.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvferry import InputError, ReasonCode, Refused, config_as

ATTENTION = "full_attention"
LINEAR = "linear_attention"
HYBRID = "kvferry_hybrid"
FAMILIES = ("llama", "qwen3", HYBRID)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions stretched the way Llama 3 does it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LinearConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The gated linear-attention layers of the hybrid."""

    heads: int
    key_dim: int
    value_dim: int
    kernel: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the engine has to know about a model before it reads weights."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    max_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    linear: LinearConfig | None = None
    end_tokens: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layer_types)

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head is normalised before the rotation."""
        return self.family != "llama"

    def layers_of(self, layer_type: str) -> tuple[int, ...]:
        """The numbers of the layers of one type."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == layer_type)

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read ``config.json`` of a model folder, and the end tokens it has elsewhere."""
        config = _checked(config_as(folder, _RawConfig))
        path = folder / "generation_config.json"
        chat = config_as(path, _GenerationConfig) if path.is_file() else _GenerationConfig()
        tokens = config.end_tokens + _end_tokens(chat.eos_token_id)
        return replace(config, end_tokens=tuple(dict.fromkeys(tokens)))


class _RawConfig(msgspec.Struct, kw_only=True):
    """The fields of ``config.json`` that matter, under their published names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | list[int] | None = None
    linear_num_key_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0


class _GenerationConfig(msgspec.Struct):
    """What is used of ``generation_config.json``: chat models end their turns with more tokens."""

    eos_token_id: int | list[int] | None = None


def _checked(raw: _RawConfig) -> ModelConfig:
    _demand(raw.model_type in FAMILIES, f"its model_type is {raw.model_type!r:.40}")
    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    layer_types = raw.layer_types or (ATTENTION,) * raw.num_hidden_layers
    linear = _linear(raw) if raw.model_type == HYBRID else None
    _demand(raw.hidden_act == "silu", f"its activation is {raw.hidden_act!r}, not silu")
    _demand(not (raw.attention_bias or raw.mlp_bias), "its projections have biases")
    _demand(not raw.use_sliding_window, "it uses a sliding window")
    _demand(heads % kv_heads == 0, f"{kv_heads} KV heads do not divide {heads} query heads")
    known = {ATTENTION, LINEAR} if linear else {ATTENTION}
    _demand(set(layer_types) == known, f"its layers are of the types {', '.join(set(layer_types))}")
    _demand(
        len(layer_types) == raw.num_hidden_layers,
        f"it lists {len(layer_types)} layers and says it has {raw.num_hidden_layers}",
    )
    theta, scaling = _rope(raw)
    return ModelConfig(
        family=raw.model_type,
        vocab=raw.vocab_size,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.head_dim or raw.hidden_size // heads,
        layer_types=layer_types,
        max_tokens=raw.max_position_embeddings,
        norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=raw.tie_word_embeddings,
        linear=linear,
        end_tokens=_end_tokens(raw.eos_token_id),
    )


def _demand(fits: bool, what: str) -> None:
    if not fits:
        raise Refused.because(
            ReasonCode.BAD_CONFIG,
            f"this engine can't run the model: {what}; use a plain Llama or dense Qwen3 model",
        )


def _rope(raw: _RawConfig) -> tuple[float, RopeScaling | None]:
    """The base and the scaling, from the old fields or from the newer ``rope_parameters``."""
    fields = {**(raw.rope_scaling or {}), **(raw.rope_parameters or {})}
    stated = fields.get("rope_theta", raw.rope_theta)
    theta = float(stated) if isinstance(stated, int | float) else 10000.0
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return theta, None
    _demand(kind == "llama3", f"its rotary scaling is {kind!r}")
    try:
        return theta, msgspec.convert(fields, RopeScaling)
    except msgspec.ValidationError as error:
        raise InputError(f"config.json has a bad rope_scaling ({error}); correct it") from None


def _linear(raw: _RawConfig) -> LinearConfig:
    linear = LinearConfig(
        heads=raw.linear_num_key_heads,
        key_dim=raw.linear_key_head_dim,
        value_dim=raw.linear_value_head_dim,
        kernel=raw.linear_conv_kernel_dim,
    )
    sizes = (linear.heads, linear.key_dim, linear.value_dim, linear.kernel - 1)
    _demand(min(sizes) >= 1, "a size of its linear-attention layers is missing")
    return linear


def _end_tokens(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
