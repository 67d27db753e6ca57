"""The parts of a decoder layer that one rank computes: attention and the MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvferry import Span
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.models.batch import StepBatch
from kvferry.reference.models.config import KV, ModelConfig
from kvferry.reference.models.shard import ModelShard
from kvferry.reference.models.weights import Weights
from kvferry.reference.ranks.collectives import Comm


class Scratch:
    """A block of memory that layers gather into, one after the other.

    With fresh memory for each gather, page faults would take longer than the copy.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, shape: Sequence[int]) -> Tensor:
        """Return an uninitialised tensor, which the next call reuses."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(*shape)


class Build(NamedTuple):
    """What the modules of a rank are built from."""

    config: ModelConfig
    shard: ModelShard
    weights: Weights
    cache: RankCache
    comm: Comm
    scratch: Scratch


class Rotary:
    """Cosines and sines of a step's positions, the same for every layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = (1.0 / config.rope_theta**steps).to(device)
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, [tokens, 1, head_dim]."""
        angles = positions[:, None].float() * self._frequencies
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos().to(self._dtype), both.sin().to(self._dtype)


def rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x, x + half) of every head by its token's angles."""
    cos, sin = rotary
    one, two = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-two, one], dim=-1) * sin


class Attention:
    """One layer's attention over the paged cache, with grouped query heads."""

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
        """Write the step's entries into their pages, then attend to all entries so far."""
        q, k, v = torch.split(functional.linear(hidden, self._qkv), self._widths, dim=-1)
        q, k, v = (part.reshape(len(part), -1, self._dim) for part in (q, k, v))
        if self._norms is not None:
            q = functional.rms_norm(q, (self._dim,), self._norms[0], self._eps)
            k = functional.rms_norm(k, (self._dim,), self._norms[1], self._eps)
        self._keys[batch.page, batch.offset] = rotate(k, rotary)
        self._values[batch.page, batch.offset] = v
        # [tokens, KV heads, query heads per KV head, dim]
        mixed = self._attend(rotate(q, rotary).view(len(q), self._num_kv, -1, self._dim), batch)
        return self._comm.total(functional.linear(mixed.flatten(1), self._out))

    def _attend(self, q: Tensor, batch: StepBatch) -> Tensor:
        mixed = torch.empty_like(q)
        for rows, pages, mask in batch.singles:
            keys, values = self._gather(pages)
            # The query heads of one KV head take the place of a prompt's tokens.
            mixed[rows] = functional.scaled_dot_product_attention(q[rows], keys, values, mask)
        for chunk in batch.chunks:
            keys, values = (part[0, :, None] for part in self._gather(chunk.pages[None]))
            shape = (-1, q.shape[2], -1, -1)
            queries = q[chunk.rows].permute(1, 2, 0, 3)
            part = functional.scaled_dot_product_attention(
                queries, keys.expand(shape), values.expand(shape), chunk.mask
            )
            mixed[chunk.rows] = part.permute(2, 0, 1, 3)
        return mixed

    def _gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [page tables, KV heads, tokens, dim], until the next call."""
        both = self._scratch.take((2, pages.numel(), *self._keys.shape[1:]))
        for pool, part in zip((self._keys, self._values), both, strict=True):
            torch.index_select(pool, 0, pages.flatten(), out=part)
        keys, values = both.view(2, len(pages), -1, self._num_kv, self._dim).transpose(2, 3)
        return keys, values


class Mlp:
    """The gated feed-forward part, for the channels of this rank."""

    def __init__(self, build: Build, layer: int) -> None:
        weights, channels = build.weights, build.shard.channels
        prefix = f"model.layers.{layer}.mlp"
        self._up = weights.stacked(
            [(f"{prefix}.{name}_proj.weight", channels) for name in ("gate", "up")]
        )
        self._down = weights.columns(f"{prefix}.down_proj.weight", channels)
        self._comm = build.comm

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the sum over all ranks' channels."""
        gate, up = functional.linear(hidden, self._up).chunk(2, dim=-1)
        return self._comm.total(functional.linear(functional.silu(gate) * up, self._down))


def scaled(span: Span, by: int) -> Span:
    """Return the elements of a span of heads."""
    return Span(span.first * by, span.end * by)
