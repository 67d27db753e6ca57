"""Attention over a paged cache, with rotary positions and grouped query heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from kvferry import Span
from kvferry.reference.engine.layouts import KV
from kvferry.reference.models.compute.batch import StepBatch
from kvferry.reference.models.compute.build import Build
from kvferry.reference.models.config import ModelConfig, RopeScaling


class Rotary:
    """Rotary positions: cosines and sines of a step's tokens, for every layer alike."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**steps
        if config.rope_scaling is not None:
            frequencies = _stretched(frequencies, config.rope_scaling)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [tokens, 1, head_dim]."""
        angles = positions[:, None].float() * self._frequencies
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos().to(self._dtype), both.sin().to(self._dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: slow rotations are slowed further, fast ones stay, those between are blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x, x + half) of every head by its token's angles."""
    cos, sin = rotary
    one, two = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-two, one], dim=-1) * sin


class Attention:
    """One layer's attention: the query heads of this rank and the KV heads they read."""

    def __init__(self, build: Build, layer: int) -> None:
        config, shard, weights, cache, comm, scratch = build
        prefix = f"model.layers.{layer}.self_attn"
        dim = config.head_dim
        heads, kv_heads = scaled(shard.heads, dim), scaled(shard.kv_heads, dim)
        self._dim = dim
        self._eps = config.norm_eps
        self._widths = [len(heads), len(kv_heads), len(kv_heads)]
        self._qkv = weights.stacked(
            [
                (f"{prefix}.q_proj.weight", heads),
                (f"{prefix}.k_proj.weight", kv_heads),
                (f"{prefix}.v_proj.weight", kv_heads),
            ]
        )
        self._out = weights.columns(f"{prefix}.o_proj.weight", heads)
        self._norms: tuple[Tensor, Tensor] | None = None
        if config.head_norms:
            names = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
            self._norms = (weights.whole(names[0]), weights.whole(names[1]))
        self._keys = cache.layer(KV, "k", layer)
        self._values = cache.layer(KV, "v", layer)
        self._num_kv = len(shard.kv_heads)
        self._comm = comm
        self._scratch = scratch

    def __call__(self, hidden: Tensor, batch: StepBatch, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Write the step's entries into their pages, then attend to all that came before."""
        q, k, v = torch.split(functional.linear(hidden, self._qkv), self._widths, dim=-1)
        q, k, v = (part.reshape(len(part), -1, self._dim) for part in (q, k, v))
        if self._norms is not None:
            q = functional.rms_norm(q, (self._dim,), self._norms[0], self._eps)
            k = functional.rms_norm(k, (self._dim,), self._norms[1], self._eps)
        self._keys[batch.page, batch.offset] = rotate(k, rotary)
        self._values[batch.page, batch.offset] = v
        # [tokens, KV heads, query heads that read it, dim]
        mixed = self._attend(rotate(q, rotary).view(len(q), self._num_kv, -1, self._dim), batch)
        return self._comm.total(functional.linear(mixed.flatten(1), self._out))

    def _attend(self, q: Tensor, batch: StepBatch) -> Tensor:
        mixed = torch.empty_like(q)
        for places, pages, mask in batch.singles:
            keys, values = self._gather(pages)
            # The query heads that read one KV head stand where a prompt's tokens would.
            mixed[places] = functional.scaled_dot_product_attention(q[places], keys, values, mask)
        for rows, pages, mask in batch.chunks:
            keys, values = (part[0, :, None] for part in self._gather(pages[None]))
            shape = (-1, q.shape[2], -1, -1)
            part = functional.scaled_dot_product_attention(
                q[rows].permute(1, 2, 0, 3), keys.expand(shape), values.expand(shape), mask
            )
            mixed[rows] = part.permute(2, 0, 1, 3)
        return mixed

    def _gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of several page tables, until the next call.

        Each is [tables, KV heads, tokens, dim].
        """
        both = self._scratch.take((2, pages.numel(), *self._keys.shape[1:]))
        for pool, part in zip((self._keys, self._values), both, strict=True):
            torch.index_select(pool, 0, pages.flatten(), out=part)
        keys, values = both.view(2, len(pages), -1, self._num_kv, self._dim).transpose(2, 3)
        return keys, values


def scaled(span: Span, by: int) -> Span:
    """The elements of a span of heads."""
    return Span(span.first * by, span.end * by)
