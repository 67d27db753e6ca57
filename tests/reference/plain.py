"""The models written down from their definition: no cache, no pages, no batch, no ranks.

Everything is recomputed from the first token, heads one by one, and the
recurrence token by token. Only the names of weights are shared with the engine.
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
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for number, kind in enumerate(types):
        layer = f"model.layers.{number}."
        own = {k.removeprefix(layer): v for k, v in weights.items() if k.startswith(layer)}
        mix = linear if kind == "linear_attention" else attention
        x = x + mix(config, own, norm(x, own["input_layernorm.weight"]))
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


def linear(config: dict[str, Any], own: Weights, x: Tensor) -> Tensor:
    heads = config["linear_num_key_heads"]
    dims = {
        "q": config["linear_key_head_dim"],
        "k": config["linear_key_head_dim"],
        "v": config["linear_value_head_dim"],
    }
    after: Weights = {}
    for name, dim in dims.items():
        inputs = x @ own[f"linear_attn.{name}_proj.weight"].T
        after[name] = convolved(inputs, own[f"linear_attn.conv_{name}.weight"]).view(
            len(x), heads, dim
        )
    fade = x @ own["linear_attn.g_proj.weight"].T + own["linear_attn.g_bias"]
    keep = 1 / (1 + fade.exp())
    out = torch.zeros(len(x), heads, dims["v"], dtype=x.dtype)
    for head in range(heads):
        state = torch.zeros(dims["k"], dims["v"], dtype=x.dtype)
        for t in range(len(x)):
            state = keep[t, head] * state + torch.outer(after["k"][t, head], after["v"][t, head])
            out[t, head] = after["q"][t, head] @ state / math.sqrt(dims["k"])
    gate = silu(x @ own["linear_attn.z_proj.weight"].T)
    mixed = norm(out, own["linear_attn.norm.weight"]).flatten(1) * gate
    return mixed @ own["linear_attn.o_proj.weight"].T


def convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Each channel over its last inputs; before the first there were zeros."""
    kernel = weight.shape[1]
    out = torch.zeros_like(inputs)
    for t in range(len(inputs)):
        for back in range(kernel):
            if t - back >= 0:
                out[t] += inputs[t - back] * weight[:, kernel - 1 - back]
    return silu(out)
