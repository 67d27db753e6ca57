"""The model as one rank computes it: embedding, layers of attention and MLP, logits.

Ranks share the heads and the MLP's channels. Each has the whole embedding, and rank 0 alone
computes logits. All tokens of a step go through a layer together, but for attention, which looks
at one request after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvferry import Span
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import RequestWork
from kvferry.reference.models.config import KV, ModelConfig
from kvferry.reference.models.shard import ModelShard, Weights
from kvferry.reference.ranks.collectives import Comm

EMBEDDING = "model.embed_tokens"
Rotation = tuple[Tensor, Tensor]


class Chunk(NamedTuple):
    """The tokens of one request: rows in the step, pages, attention mask."""

    rows: slice
    pages: Tensor
    mask: Tensor


class StepBatch(NamedTuple):
    """All tokens of a step, and the rows whose logits are wanted; the same for every layer."""

    tokens: Tensor
    positions: Tensor
    page: Tensor
    offset: Tensor
    chunks: list[Chunk]
    wanted: list[int]


def make_batch(works: Sequence[RequestWork], page_tokens: int, device: torch.device) -> StepBatch:
    """Return the tensors of a step that has at least one token."""

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=device)

    chunks, wanted, begin = [], [], 0
    for work in works:
        end = begin + len(work.tokens)
        key = torch.arange(len(work.pages) * page_tokens, device=device)
        query = torch.arange(work.first, work.end, device=device)
        chunks.append(Chunk(slice(begin, end), tensor(work.pages), key <= query[:, None]))
        if work.sampling:
            wanted.append(end - 1)
        begin = end
    places = [(work, at) for work in works for at in range(work.first, work.end)]
    return StepBatch(
        tokens=tensor(token for work in works for token in work.tokens),
        positions=tensor(at for _, at in places),
        page=tensor(work.pages[at // page_tokens] for work, at in places),
        offset=tensor(at % page_tokens for _, at in places),
        chunks=chunks,
        wanted=wanted,
    )


class Build(NamedTuple):
    """What the layers of a rank are built from."""

    config: ModelConfig
    shard: ModelShard
    weights: Weights
    cache: RankCache
    comm: Comm


class Attention:
    """One layer's attention over the paged cache, with grouped query heads."""

    def __init__(self, build: Build, layer: int) -> None:
        config, shard, weights, cache, comm = build
        prefix = f"model.layers.{layer}.self_attn"
        self._dim = dim = config.head_dim
        self._eps = config.norm_eps
        heads, kv_heads = (
            Span(span.first * dim, span.end * dim) for span in (shard.heads, shard.kv_heads)
        )
        spans = heads, kv_heads, kv_heads
        self._widths = list(map(len, spans))
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = weights.stacked(list(zip(names, spans, strict=True)))
        self._out = weights.columns(f"{prefix}.o_proj", heads)
        norms = [f"{prefix}.{name}_norm" for name in "qk"] if config.head_norms else []
        self._norms = [weights.rows(name) for name in norms]
        self._pools = [cache.layer(KV, name, layer) for name in "kv"]
        self._num_kv = len(shard.kv_heads)
        self._comm = comm

    def __call__(self, hidden: Tensor, batch: StepBatch, rotation: Rotation) -> Tensor:
        """Write the step's entries into their pages, then attend to all entries so far."""
        parts = torch.split(functional.linear(hidden, self._qkv), self._widths, dim=-1)
        q, k, v = (part.reshape(len(part), -1, self._dim) for part in parts)
        if self._norms:
            q, k = (
                functional.rms_norm(heads, (self._dim,), norm, self._eps)
                for heads, norm in zip((q, k), self._norms, strict=True)
            )
        for pool, new in zip(self._pools, (rotate(k, rotation), v), strict=True):
            pool[batch.page, batch.offset] = new
        # [KV heads, query heads per KV head, tokens, dim]
        q = rotate(q, rotation).view(len(q), self._num_kv, -1, self._dim).permute(1, 2, 0, 3)
        mixed = torch.empty_like(q)
        for rows, pages, mask in batch.chunks:
            keys, values = (
                pool.index_select(0, pages).flatten(0, 1).transpose(0, 1)[:, None]
                for pool in self._pools
            )
            shape = (-1, q.shape[1], -1, -1)
            mixed[:, :, rows] = functional.scaled_dot_product_attention(
                q[:, :, rows], keys.expand(shape), values.expand(shape), mask
            )
        out = mixed.permute(2, 0, 1, 3).flatten(1)
        return self._comm.total(functional.linear(out, self._out))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x, x + half) of every head by its token's angles."""
    cos, sin = rotation
    one, two = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-two, one], dim=-1) * sin


class Layer:
    """Attention and an MLP over this rank's heads and channels, each behind a norm."""

    def __init__(self, build: Build, layer: int) -> None:
        weights, channels = build.weights, build.shard.channels
        prefix = f"model.layers.{layer}"
        self._eps = build.config.norm_eps
        self._before = weights.rows(f"{prefix}.input_layernorm")
        self._attention = Attention(build, layer)
        self._between = weights.rows(f"{prefix}.post_attention_layernorm")
        names = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
        self._up = weights.stacked([(name, channels) for name in names])
        self._down = weights.columns(f"{prefix}.mlp.down_proj", channels)
        self._comm = build.comm

    def __call__(self, hidden: Tensor, batch: StepBatch, rotation: Rotation) -> Tensor:
        """Add one layer to the residual stream."""
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._before, self._eps)
        hidden = hidden + self._attention(normed, batch, rotation)
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._between, self._eps)
        gate, up = functional.linear(normed, self._up).chunk(2, dim=-1)
        down = functional.linear(functional.silu(gate) * up, self._down)
        return hidden + self._comm.total(down)


class Decoder:
    """One rank's share of the model."""

    def __init__(self, build: Build) -> None:
        config, weights = build.config, build.weights
        self._eps = config.norm_eps
        self._dtype = weights.dtype
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = (1.0 / config.rope_theta**steps).to(weights.device)
        self._embedding = weights.rows(EMBEDDING)
        self._layers = [Layer(build, layer) for layer in range(config.num_layers)]
        self._norm = weights.rows("model.norm")
        self._head: Tensor | None = None
        if build.cache.rank == 0:
            self._head = self._embedding if config.tied else weights.rows("lm_head")

    @torch.inference_mode()
    def forward(self, batch: StepBatch, computed: Callable[[int], None]) -> Tensor | None:
        """Return logits of the wanted rows, [wanted, vocab], on rank 0; None elsewhere.

        Call ``computed`` for each layer whose entries are in the cache (on a GPU: are queued).
        """
        hidden = functional.embedding(batch.tokens, self._embedding)
        angles = batch.positions[:, None].float() * self._frequencies
        both = torch.cat([angles, angles], dim=-1)[:, None]
        rotation = both.cos().to(self._dtype), both.sin().to(self._dtype)
        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, batch, rotation)
            computed(number)
        if self._head is None or not batch.wanted:
            return None
        wanted = hidden[batch.wanted]
        normed = functional.rms_norm(wanted, wanted.shape[-1:], self._norm, self._eps)
        return functional.linear(normed, self._head)
