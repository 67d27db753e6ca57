"""A Llama of random weights whose answers depend on every page of the prompt's cache.

Queries and keys are large, so that attention looks at few tokens: with soft attention over
thousands of random tokens, a wrong page would hardly change an answer.

Usage: python -m gpu_engines.model FOLDER LAYERS HEADS KV_HEADS HIDDEN INTERMEDIATE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HEAD_DIM = 128
VOCABULARY = 4096
# Ids below are special.
FIRST_WORD = 3
MAX_TOKENS = 65_536


class ModelSize(NamedTuple):
    """The sizes of a Llama with heads of 128."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int


def write_model(folder: Path, size: ModelSize) -> None:
    """Write configuration, tokenizer and weights. A word ``w7`` is the token 7."""
    # Only the process that writes a model imports torch.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    for name, document in _documents(size).items():
        (folder / name).write_text(json.dumps(document))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(7)

    def random(rows: int, columns: int, scale: float) -> Any:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * (scale / columns**0.5)).to(torch.bfloat16).cpu()

    def ones(count: int) -> Any:
        return torch.ones(count, dtype=torch.bfloat16)

    weights = _weights(size, random, ones)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(
    size: ModelSize, random: Callable[[int, int, float], Any], ones: Callable[[int], Any]
) -> dict[str, Any]:
    hidden, inner = size.hidden, size.intermediate
    queries, keys = size.heads * HEAD_DIM, size.kv_heads * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": random(VOCABULARY, hidden, 4.0),
    }
    for layer in range(size.layers):
        parts = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": random(queries, hidden, 2.0),
            "self_attn.k_proj": random(keys, hidden, 2.0),
            "self_attn.v_proj": random(keys, hidden, 1.0),
            "self_attn.o_proj": random(hidden, queries, 0.5),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": random(inner, hidden, 1.0),
            "mlp.up_proj": random(inner, hidden, 1.0),
            "mlp.down_proj": random(hidden, inner, 0.5),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    return weights


def _documents(size: ModelSize) -> dict[str, Any]:
    special = ("<unk>", "<s>", "</s>")
    words = {word: number for number, word in enumerate(special)}
    words |= {f"w{number}": number for number in range(FIRST_WORD, VOCABULARY)}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = [
        {"id": number, "content": word, "special": True} | dict.fromkeys(flags, False)
        for number, word in enumerate(special)
    ]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_TOKENS,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    return {
        "config.json": config | ids,
        "generation_config.json": ids,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": MAX_TOKENS,
        },
    }


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), ModelSize(*map(int, sys.argv[2:])))
