"""A model's configuration, read from a Hugging Face folder, and what its cache keeps.

The engine runs two published families, Llama and dense Qwen3. It refuses a configuration that
it would compute wrongly (another activation, biases, rotary scaling, a sliding window).
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry import CacheSpec, DType, Paged, ReasonCode, Refused, attention_group, decode_config

KV = "kv"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``config.json`` that are used, most of them under shorter names."""

    family: str = msgspec.field(name="model_type")
    vocab: int = msgspec.field(name="vocab_size")
    hidden: int = msgspec.field(name="hidden_size")
    intermediate: int = msgspec.field(name="intermediate_size")
    num_layers: int = msgspec.field(name="num_hidden_layers")
    heads: int = msgspec.field(name="num_attention_heads")
    own_kv_heads: int | None = msgspec.field(default=None, name="num_key_value_heads")
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
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def head_norms(self) -> bool:
        """Whether each query and key head is normalised before the rotation."""
        return self.family == "qwen3"

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.own_kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.own_head_dim or self.hidden // self.heads

    @property
    def rope(self) -> dict[str, object]:
        """Parameters of the rotation; newer configurations keep them in ``rope_parameters``."""
        theta = {"rope_theta": self.own_rope_theta or 10000.0}
        return theta | (self.rope_scaling or {}) | (self.rope_parameters or {})

    @property
    def rope_theta(self) -> float:
        """The base of the rotation's frequencies."""
        return float(str(self.rope["rope_theta"]))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def cache(self, dtype: DType) -> CacheSpec:
        """Return what the model keeps of each token."""
        layers = tuple(range(self.num_layers))
        kv = attention_group(KV, Paged(), layers, self.kv_heads, self.head_dim, None, dtype)
        return CacheSpec(self.num_layers, (kv,))

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
    rope_type = config.rope.get("rope_type", config.rope.get("type", "default"))
    if config.family not in ("llama", "qwen3"):
        yield f"its model_type is {config.family!r:.40}"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act!r}, not silu"
    if config.attention_bias or config.mlp_bias:
        yield "its projections have biases"
    if config.use_sliding_window:
        yield "it uses a sliding window"
    if config.heads % config.kv_heads:
        yield f"{config.kv_heads} KV heads do not divide {config.heads} query heads"
    if others := set(config.layer_types or ()) - {"full_attention"}:
        yield f"it has layers of the types {', '.join(others)}"
    if rope_type != "default":
        yield f"its rotary scaling is {rope_type!r}"
