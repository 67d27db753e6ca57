"""Models to serve: SmolLM2 for TP1 and TP3, and SmolLM2 with padded heads for TP2.

Padding its 9 query and 3 KV heads with zeros to 12 and 4 does not change the answers. The heads
are also permuted, so that every rank of TP2 has non-zero ones. A variant has windows in every
other layer, which makes its answers less meaningful but still dependent on the prompt.
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

# Origin of each KV head of the padded model; None is a head of zeros.
KV_HEADS = (2, None, 0, 1)
WINDOW = 64
Array = NDArray[np.float32]


def plain() -> Path:
    """SmolLM2-135M-Instruct: 9 query heads, 3 KV heads, 30 layers."""
    return default_model()


def padded(folder: Path, *, windows: bool = False) -> Path:
    """Write the model with 12 query heads and 4 KV heads into a folder."""
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
    """Return the rows of each KV head in the padded order."""
    zeros = np.zeros((num_rows, tensor.shape[1]), np.float32)
    parts = [
        zeros if head is None else tensor[head * num_rows : (head + 1) * num_rows]
        for head in KV_HEADS
    ]
    return np.ascontiguousarray(np.concatenate(parts))
