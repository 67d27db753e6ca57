"""The models written down from their definition: no cache, no pages, no batch, no ranks.

Everything is recomputed from the first token, heads one by one. Only the names of weights are
shared with the engine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]


def plain_logprobs(folder: Path, tokens: list[int]) -> Tensor:
    """Log-probabilities of the token after each of these: [tokens, vocab]."""
    config = json.loads((folder / "config.json").read_text())
    weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        own = {k.removeprefix(layer): v for k, v in weights.items() if k.startswith(layer)}
        x = x + attention(config, own, norm(x, own["input_layernorm.weight"]))
        x = x + mlp(own, norm(x, own["post_attention_layernorm.weight"]))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return (norm(x, weights["model.norm.weight"]) @ head.T).log_softmax(-1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def mlp(own: Weights, x: Tensor) -> Tensor:
    inner = silu(x @ own["mlp.gate_proj.weight"].T) * (x @ own["mlp.up_proj.weight"].T)
    return inner @ own["mlp.down_proj.weight"].T


def turn(head: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (i, i + half) of each position by position * theta^(-2i/dim)."""
    out = head.clone()
    dim = head.shape[1]
    positions = torch.arange(len(head), dtype=head.dtype)
    for i in range(dim // 2):
        angle = positions * theta ** (-2 * i / dim)
        a, b = head[:, i], head[:, i + dim // 2]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + dim // 2] = b * angle.cos() + a * angle.sin()
    return out


def attention(config: dict[str, Any], own: Weights, x: Tensor) -> Tensor:
    heads, dim = config["num_attention_heads"], config["head_dim"]
    per_kv = heads // config["num_key_value_heads"]
    q, k, v = (x @ own[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    outs = []
    for head in range(heads):
        kv = head // per_kv
        mine, key = q[:, head * dim : (head + 1) * dim], k[:, kv * dim : (kv + 1) * dim]
        if "self_attn.q_norm.weight" in own:
            mine = norm(mine, own["self_attn.q_norm.weight"])
            key = norm(key, own["self_attn.k_norm.weight"])
        mine, key = turn(mine, config["rope_theta"]), turn(key, config["rope_theta"])
        scores = (mine @ key.T / math.sqrt(dim)).masked_fill(hidden, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, kv * dim : (kv + 1) * dim])
    return torch.cat(outs, dim=1) @ own["self_attn.o_proj.weight"].T
