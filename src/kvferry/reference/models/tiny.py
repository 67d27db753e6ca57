"""Small random models, for tests and for trying things out.

Their text is nonsense. The weights are large enough for answers to depend on the prompt. The
tokenizer has a token for each byte and one for the end.
"""

from __future__ import annotations

from enum import StrEnum, auto
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from kvferry.reference.models.config import ModelConfig

END = "<end>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{{ 'assistant: ' }}"
)


class TinyKind(StrEnum):
    """Families of which there is a small model."""

    LLAMA = auto()
    QWEN3 = auto()


def make_tiny(
    folder: Path, kind: TinyKind = TinyKind.LLAMA, seed: int = 0, **changes: object
) -> Path:
    """Write a model folder: configuration with these changes, weights, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(tiny_config(kind) | changes))
    random = torch.Generator().manual_seed(seed)
    shapes = _shapes(ModelConfig.load(folder))
    weights = {name: _random(shape, random) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": END}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return folder


def tiny_config(kind: TinyKind) -> dict[str, object]:
    """Return a configuration in the published form.

    Three KV heads fit TP 1, 3 and 6 (replicated), two fit TP 1, 2, 4 and 6.
    """
    return {
        "model_type": kind.value,
        "vocab_size": 257,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3 if kind is TinyKind.LLAMA else 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": kind is not TinyKind.LLAMA,
        "eos_token_id": 256,
    }


def byte_tokenizer() -> FastTokenizer:
    """Return a tokenizer in which byte b is token b, and 256 is the end."""
    # Byte-level tokenizers write printable bytes as themselves and others as letters above 255.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    fast = FastTokenizer(models.BPE({letter: b for b, letter in letters.items()}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END)])
    return fast


def _random(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return a vector around 1, or a matrix that keeps the size of what it multiplies."""
    noise = torch.randn(shape, generator=random)
    return 1 + 0.1 * noise if len(shape) == 1 else 1.5 * noise / shape[-1] ** 0.5


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden, config.head_dim
    query, kv = config.heads * dim, config.kv_heads * dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (config.intermediate, hidden),
        "mlp.up_proj": (config.intermediate, hidden),
        "mlp.down_proj": (hidden, config.intermediate),
    }
    if config.head_norms:
        layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    for number in range(config.num_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    return shapes
