"""The model as one rank computes it: embedding, layers, logits.

A layer is a mixer and an MLP. The mixer of most layers is attention over the paged cache. The
hybrid also has gated linear attention, whose cache of a request is one row of fixed size: each
head has a matrix S that every token decays and adds to,

    S[t] = exp(g[t]) · S[t-1] + k[t]ᵀ v[t]        o[t] = q[t] S[t]

with q, k and v first passed through a short causal convolution. The request's row keeps S and
the last inputs of the convolutions. A chunk is computed at once: its tokens see each other
through the matrix of decays between them, and everything before the chunk through S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvferry import Span
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.models.batch import StateRun, StepBatch
from kvferry.reference.models.config import KV, LINEAR, STATE, ModelConfig
from kvferry.reference.models.shard import ModelShard, even_share
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


class LinearAttention:
    """One layer's gated linear attention, for the state heads of this rank."""

    def __init__(self, build: Build, layer: int) -> None:
        config, shard, weights, cache, comm, _ = build
        prefix = f"model.layers.{layer}.linear_attn"
        heads = shard.state_heads
        key, value = (scaled(heads, d) for d in (config.key_dim, config.value_dim))
        kernel = config.kernel
        self._dims = (config.key_dim, config.key_dim, config.value_dim)
        self._eps = config.norm_eps
        self._widths = [len(key), len(key), len(value), len(value), len(heads)]
        self._in = weights.stacked(
            [
                (f"{prefix}.{name}_proj.weight", span)
                for name, span in zip("qkvzg", (key, key, value, value, heads), strict=True)
            ]
        )
        self._bias = weights.rows(f"{prefix}.g_bias", heads)
        self._norm = weights.whole(f"{prefix}.norm.weight")
        self._out = weights.columns(f"{prefix}.o_proj.weight", value)
        self._filters = [
            weights.rows(f"{prefix}.conv_{name}.weight", span).view(len(heads), -1, kernel)
            for name, span in zip("qkv", (key, key, value), strict=True)
        ]
        self._inputs = [cache.layer(STATE, f"conv_{name}", layer) for name in "qkv"]
        self._sums = cache.layer(STATE, "recurrent", layer)
        # All ranks that hold the same heads keep their state, but only one adds to the sum.
        replicas = max(1, comm.tp // config.linear_heads)
        self._is_replica = shard.tp_rank % replicas != 0
        self._comm = comm

    def __call__(self, hidden: Tensor, batch: StepBatch, _rotary: object) -> Tensor:
        """Run each request's tokens through its state, which needs no rotation."""
        *qkv, gate, g = torch.split(functional.linear(hidden, self._in), self._widths, dim=-1)
        decay = -functional.softplus(g.float() + self._bias.float())
        heads = [x.reshape(len(x), -1, dim) for x, dim in zip(qkv, self._dims, strict=True)]
        mixed = torch.cat([self._run(run, heads, decay) for run in batch.runs])
        normed = functional.rms_norm(mixed, mixed.shape[-1:], self._norm, self._eps)
        gated = normed.flatten(1) * functional.silu(gate)
        out = functional.linear(gated, self._out)
        return self._comm.total(out.zero_() if self._is_replica else out)

    def _run(self, run: StateRun, heads: list[Tensor], decay: Tensor) -> Tensor:
        if run.is_first:
            for state in (*self._inputs, self._sums):
                state[run.state_row] = 0
        q, k, v = (
            self._convolve(x[run.rows], weight, inputs[run.state_row])
            for x, weight, inputs in zip(heads, self._filters, self._inputs, strict=True)
        )
        kept = self._sums[run.state_row].view(-1, self._dims[1], self._dims[2])
        q = q * self._dims[0] ** -0.5
        mixed, new = decay_and_add(q, k, v, decay[run.rows], kept)
        kept.copy_(new)
        return mixed.to(v.dtype)

    @staticmethod
    def _convolve(x: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """Return a causal convolution over [tokens, heads, dim] that continues ``inputs``."""
        before = inputs.view(x.shape[1], -1, x.shape[2]).transpose(0, 1)
        joined = torch.cat([before, x])
        windows = joined.unfold(0, weight.shape[-1], 1)
        before.copy_(joined[-before.shape[0] :])
        return functional.silu((windows * weight).sum(-1))


def decay_and_add(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a chunk; return outputs [tokens, heads, value_dim] and the state.

    ``decay`` is the logarithm of each token's factor, [tokens, heads], never above 0.
    """
    summed = decay.cumsum(0).T
    between = summed[:, :, None] - summed[:, None, :]
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    weight = between.masked_fill(later, -torch.inf).exp()
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    near = (q @ k.transpose(1, 2) * weight) @ v
    far = (q @ state) * summed[..., None].exp()
    left = (summed[:, -1:] - summed).exp()
    new = state * summed[:, -1, None, None].exp() + (k * left[..., None]).transpose(1, 2) @ v
    return (near + far).transpose(0, 1), new


def scaled(span: Span, by: int) -> Span:
    """Return the elements of a span of heads."""
    return Span(span.first * by, span.end * by)


class Layer:
    """A mixer (attention or linear attention) and an MLP, each behind a norm."""

    def __init__(self, build: Build, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self._eps = build.config.norm_eps
        self._norms = [
            build.weights.whole(f"{prefix}.{name}_layernorm.weight")
            for name in ("input", "post_attention")
        ]
        is_linear = build.config.layer_types[layer] == LINEAR
        self._mixer = (LinearAttention if is_linear else Attention)(build, layer)
        self._mlp = Mlp(build, layer)

    def __call__(self, hidden: Tensor, batch: StepBatch, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Add one layer to the residual stream."""
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norms[0], self._eps)
        hidden = hidden + self._mixer(normed, batch, rotary)
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norms[1], self._eps)
        return hidden + self._mlp(normed)


class Decoder:
    """One rank's stage of the model."""

    def __init__(self, build: Build) -> None:
        config, shard, weights, _, comm, _ = build
        self._config = config
        self._shard = shard
        self._comm = comm
        self._dtype, self._device = weights.dtype, weights.device
        self._rotary = Rotary(config, weights.dtype, weights.device)
        embedding = "model.embed_tokens.weight"
        if shard.is_first:
            self._embedding = weights.rows(embedding, shard.vocab)
        self._layers = [
            Layer(build, layer) for layer in range(shard.layers.first, shard.layers.end)
        ]
        if shard.is_last:
            self._norm = weights.whole("model.norm.weight")
            self._head = (
                self._embedding
                if config.tied and shard.is_first
                else weights.rows(embedding if config.tied else "lm_head.weight", shard.vocab)
            )

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, computed: Callable[[int], None] = lambda layer: None
    ) -> Tensor | None:
        """Return logits of the wanted rows, [wanted, vocab], on the lead rank; None elsewhere.

        Call ``computed`` for each layer whose entries are in the cache (on a GPU: are queued).
        """
        hidden = self._embed(batch) if self._shard.is_first else self._take_over(batch)
        rotary = self._rotary(batch.positions)
        for number, layer in enumerate(self._layers, start=self._shard.layers.first):
            hidden = layer(hidden, batch, rotary)
            computed(number)
        if not self._shard.is_last:
            self._comm.pass_on(hidden)
            return None
        return self._logits(hidden[batch.wanted]) if len(batch.wanted) else None

    def _embed(self, batch: StepBatch) -> Tensor:
        """Sum the embeddings over the ranks, each of which has some of the vocabulary."""
        vocab = self._shard.vocab
        local = batch.tokens - vocab.first
        foreign = (local < 0) | (local >= len(vocab))
        rows = functional.embedding(local.masked_fill(foreign, 0), self._embedding)
        return self._comm.total(rows.masked_fill(foreign[:, None], 0))

    def _take_over(self, batch: StepBatch) -> Tensor:
        shape = (batch.num_tokens, self._config.hidden)
        return self._comm.take_over(torch.empty(shape, dtype=self._dtype, device=self._device))

    def _logits(self, hidden: Tensor) -> Tensor | None:
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norm, self._config.norm_eps)
        tp = self._shard.parallel.tp
        widths = [len(even_share(self._config.vocab, tp, rank)) for rank in range(tp)]
        return self._comm.join_columns(functional.linear(normed, self._head), widths)
