"""Models to serve: SmolLM2 as it is, for TP 1 and 3, and with padded heads for TP 2.

With windows, every other layer of it sees the last few tokens only. What it says then makes less
sense, and follows from the prompt all the same.

Its 9 query and 3 KV heads become 12 and 4 by heads of zeros, which changes nothing that the model
says. The heads are permuted too, so that every rank of TP2 holds some that matter.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kvferry.reference.models.find import default_model

# Where each KV head of the padded model comes from; None is a head of zeros.
KV_HEADS = (2, None, 0, 1)
WINDOW = 64
Array = NDArray[np.float32]


def plain() -> Path:
    """SmolLM2-135M-Instruct: 9 query heads, 3 KV heads, 30 layers."""
    return default_model()


def padded(folder: Path, *, windows: bool = False) -> Path:
    """The same with 12 query heads and 4 KV heads, in that folder."""
    source = plain()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    changed: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4}
    if windows:
        kinds = ("sliding_attention", "full_attention")
        layers = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
        changed |= {"layer_types": layers, "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config | changed))
    dim = int(config["head_dim"])
    tensors: dict[str, Array] = load_file(source / "model.safetensors")
    made = {name: _padded(name, tensor, dim) for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _padded(name: str, tensor: Array, dim: int) -> Array:
    if ".q_proj." in name:
        return _rows(tensor, 3 * dim)
    if ".k_proj." in name or ".v_proj." in name:
        return _rows(tensor, dim)
    if ".o_proj." in name:
        return np.ascontiguousarray(_rows(tensor.T, 3 * dim).T)
    return tensor


def _rows(tensor: Any, num_rows: int) -> Array:
    """The rows of each KV head in the padded order."""
    zeros = np.zeros((num_rows, tensor.shape[1]), np.float32)
    parts = [
        zeros if head is None else tensor[head * num_rows : (head + 1) * num_rows]
        for head in KV_HEADS
    ]
    return np.ascontiguousarray(np.concatenate(parts))
