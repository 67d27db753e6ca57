"""A small hybrid model with random weights: Mamba-2 layers and one attention layer, like Granite 4.

Its state has one B/C group, which is replicated on every rank, and sharded heads. Its answers are
meaningless but depend on every token of the prompt.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests_vllm.models import plain

VOCABULARY, HIDDEN, INNER, MLP = 2048, 128, 256, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
MAMBA_HEADS, MAMBA_HEAD_DIM, STATE, KERNEL = 8, 32, 16, 4
KINDS = ("mamba", "mamba", "attention", "mamba")
SPREAD = 0.1
CONFIG: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "shared_intermediate_size": MLP,
    "num_hidden_layers": len(KINDS),
    "layer_types": [{"mamba": "linear_attention"}.get(kind, "full_attention") for kind in KINDS],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "max_position_embeddings": 2048,
    "position_embedding_type": "nope",
    "mamba_n_heads": MAMBA_HEADS,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE,
    "mamba_d_head": MAMBA_HEAD_DIM,
    "mamba_d_conv": KERNEL,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
Array = NDArray[np.float32]


def granite(folder: Path) -> Path:
    """Write the model into a folder, with another model's tokenizer. Prompts are token ids."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain() / name, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for number, kind in enumerate(KINDS):
        own = _attention() if kind == "attention" else _mamba()
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    return {name: _drawn(rng, name, shape) for name, shape in shapes.items()}


def _mlp() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "shared_mlp.input_linear.weight": (2 * MLP, HIDDEN),
        "shared_mlp.output_linear.weight": (HIDDEN, MLP),
    }


def _attention() -> dict[str, tuple[int, ...]]:
    return _mlp() | {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }


def _mamba() -> dict[str, tuple[int, ...]]:
    channels = INNER + 2 * STATE
    return _mlp() | {
        "mamba.dt_bias": (MAMBA_HEADS,),
        "mamba.A_log": (MAMBA_HEADS,),
        "mamba.D": (MAMBA_HEADS,),
        "mamba.norm.weight": (INNER,),
        "mamba.conv1d.weight": (channels, 1, KERNEL),
        "mamba.conv1d.bias": (channels,),
        "mamba.in_proj.weight": (INNER + channels + MAMBA_HEADS, HIDDEN),
        "mamba.out_proj.weight": (HIDDEN, INNER),
    }


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Set neutral norms, and a different decay for each head."""
    if name.endswith("A_log"):
        return np.log(np.arange(1, shape[0] + 1, dtype=np.float32))
    if name.endswith(("norm.weight", "mamba.D")):
        return np.ones(shape, np.float32)
    if name.endswith(("bias", "dt_bias")):
        return np.zeros(shape, np.float32)
    return (SPREAD * rng.standard_normal(shape)).astype(np.float32)
