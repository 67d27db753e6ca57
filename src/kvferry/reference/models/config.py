"""A model's configuration, read from a Hugging Face folder, and the layout of its cache.

The engine runs two published families, Llama and dense Qwen3, and a hybrid of its own with
gated linear-attention layers between attention layers. It refuses a configuration that it
would compute wrongly (another activation, biases, rotary scaling, a sliding window).
The layout is the single source of truth: the layers and KV heads that a rank computes
(``shard.py``) and its cache memory follow from it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry import (
    CacheSpec,
    DType,
    Group,
    InputError,
    Layout,
    Order,
    Paged,
    Parallel,
    ReasonCode,
    Refused,
    StateRow,
    Tensor,
    attention_group,
    decode_config,
)

ATTENTION = "full_attention"
LINEAR = "linear_attention"
HYBRID = "kvferry_hybrid"
KV = "kv"
STATE = "state"
FAMILIES = ("llama", "qwen3", HYBRID)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``config.json`` that are used, most of them under shorter names."""

    family: str = msgspec.field(name="model_type")
    vocab: int = msgspec.field(name="vocab_size")
    hidden: int = msgspec.field(name="hidden_size")
    intermediate: int = msgspec.field(name="intermediate_size")
    num_layers: int = msgspec.field(name="num_hidden_layers")
    heads: int = msgspec.field(name="num_attention_heads")
    num_key_value_heads: int | None = None
    own_head_dim: int | None = msgspec.field(default=None, name="head_dim")
    max_tokens: int = msgspec.field(default=2048, name="max_position_embeddings")
    norm_eps: float = msgspec.field(default=1e-6, name="rms_norm_eps")
    own_rope_theta: float | None = msgspec.field(default=None, name="rope_theta")
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    tied: bool = msgspec.field(default=False, name="tie_word_embeddings")
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    own_layer_types: tuple[str, ...] | None = msgspec.field(default=None, name="layer_types")
    eos_token_id: int | list[int] | None = None
    # Sizes of the hybrid's gated linear-attention layers.
    linear_heads: int = msgspec.field(default=0, name="linear_num_key_heads")
    key_dim: int = msgspec.field(default=0, name="linear_key_head_dim")
    value_dim: int = msgspec.field(default=0, name="linear_value_head_dim")
    kernel: int = msgspec.field(default=0, name="linear_conv_kernel_dim")

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have a recurrent state."""
        return self.family == HYBRID

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head is normalised before the rotation."""
        return self.family != "llama"

    @property
    def kv_heads(self) -> int:
        """KV heads of an attention layer."""
        return self.num_key_value_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.own_head_dim or self.hidden // self.heads

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The type of each layer."""
        return self.own_layer_types or (ATTENTION,) * self.num_layers

    @property
    def rope(self) -> dict[str, object]:
        """Parameters of the rotation; newer configurations keep them in ``rope_parameters``."""
        theta = {"rope_theta": self.own_rope_theta} if self.own_rope_theta else {}
        return {**theta, **(self.rope_scaling or {}), **(self.rope_parameters or {})}

    @property
    def rope_theta(self) -> float:
        """The base of the rotation's frequencies."""
        return float(str(self.rope.get("rope_theta", 10000.0)))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def layers_of(self, layer_type: str) -> tuple[int, ...]:
        """Return the numbers of the layers of one type."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == layer_type)

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Read ``config.json``; refuse a model that would be computed wrongly."""
        config = decode_config(folder, ModelConfig)
        for problem in _problems(config):
            raise Refused.because(
                ReasonCode.BAD_CONFIG,
                f"this engine can't run the model: {problem}; use a plain Llama or dense Qwen3 "
                f"model",
            )
        return config


def _problems(config: ModelConfig) -> Iterator[str]:
    """Yield reasons for which this engine cannot run a model."""
    types = set(config.layer_types)
    rope_type = config.rope.get("rope_type", config.rope.get("type", "default"))
    sizes = (config.linear_heads, config.key_dim, config.value_dim, config.kernel - 1)
    if config.family not in FAMILIES:
        yield f"its model_type is {config.family!r:.40}"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act!r}, not silu"
    if config.attention_bias or config.mlp_bias:
        yield "its projections have biases"
    if config.use_sliding_window:
        yield "it uses a sliding window"
    if config.heads % config.kv_heads:
        yield f"{config.kv_heads} KV heads do not divide {config.heads} query heads"
    if types != ({ATTENTION, LINEAR} if config.is_hybrid else {ATTENTION}):
        yield f"its layers are of the types {', '.join(types)}"
    if len(config.layer_types) != config.num_layers:
        yield f"it lists {len(config.layer_types)} layers and says it has {config.num_layers}"
    if rope_type != "default":
        yield f"its rotary scaling is {rope_type!r}"
    if config.is_hybrid and min(sizes) < 1:
        yield "a size of its linear-attention layers is missing"


# ---------------------------------------------------------------- its cache


def cache_spec(config: ModelConfig, dtype: DType = DType.FLOAT32) -> CacheSpec:
    """Return what the model keeps: K and V per token, and for a hybrid a state row."""
    layers = config.layers_of(ATTENTION)
    kv = attention_group(KV, Paged(), layers, config.kv_heads, config.head_dim, None, dtype)
    if not config.is_hybrid:
        return CacheSpec(config.num_layers, (kv,))
    width = config.kernel - 1
    # One unit is a head with its recurrent state and the last inputs of its convolutions.
    tensors = (
        Tensor("conv_q", dtype, width * config.key_dim),
        Tensor("conv_k", dtype, width * config.key_dim),
        Tensor("conv_v", dtype, width * config.value_dim),
        Tensor("recurrent", DType.FLOAT32, config.key_dim * config.value_dim),
    )
    state = Group(STATE, StateRow(), config.layers_of(LINEAR), config.linear_heads, tensors)
    return CacheSpec(config.num_layers, (kv, state))


def layout_for(
    config: ModelConfig,
    parallel: Parallel,
    *,
    page_tokens: int = 16,
    order: Order = Order.NHD,
    dtype: DType = DType.FLOAT32,
) -> Layout:
    """Return the layout of the model's cache under this sharding."""
    if parallel.cp != 1:
        raise InputError(f"this engine has no context parallelism; use cp=1, not {parallel.cp}")
    if parallel.tp > config.heads:
        raise Refused.because(
            ReasonCode.TP_UNITS,
            f"tp={parallel.tp} is more ranks than the model's {config.heads} query heads; lower tp",
        )
    return Layout(cache_spec(config, dtype), parallel, page_tokens=page_tokens, order=order)
