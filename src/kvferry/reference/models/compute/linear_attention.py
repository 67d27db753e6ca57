"""Gated linear attention: a layer whose memory of a request is one row, whatever its length.

For each head there is a matrix S that every token fades and adds to,

    S[t] = exp(g[t]) · S[t-1] + k[t]ᵀ v[t]        o[t] = q[t] S[t]

with q, k and v first passed through a short causal convolution. What must be
kept is S and the convolutions' last inputs, in the request's row of the cache.
A chunk is computed at once: its tokens see each other through the matrix of
fadings between them, and everything before through S.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.reference.engine.layouts import STATE
from kvferry.reference.models.compute.attention import scaled
from kvferry.reference.models.compute.batch import Run, StepBatch
from kvferry.reference.models.compute.build import Build


class LinearAttention:
    """One layer's gated linear attention, for the state heads of this rank."""

    def __init__(self, build: Build, layer: int) -> None:
        config, shard, weights, cache, comm, _ = build
        assert config.linear is not None
        prefix = f"model.layers.{layer}.linear_attn"
        heads = shard.state_heads
        key, value = (scaled(heads, d) for d in (config.linear.key_dim, config.linear.value_dim))
        kernel = config.linear.kernel
        self._dims = (config.linear.key_dim, config.linear.key_dim, config.linear.value_dim)
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
        # Ranks that hold the same heads all keep their state, but only one adds to the sum.
        replicas = max(1, comm.tp // config.linear.heads)
        self._silent = shard.tp_rank % replicas != 0
        self._comm = comm

    def __call__(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """Run each request's tokens through its row."""
        *qkv, gate, fade = torch.split(functional.linear(hidden, self._in), self._widths, dim=-1)
        fading = -functional.softplus(fade.float() + self._bias.float())
        heads = [x.reshape(len(x), -1, dim) for x, dim in zip(qkv, self._dims, strict=True)]
        mixed = torch.cat([self._run(run, heads, fading) for run in batch.runs])
        normed = functional.rms_norm(mixed, mixed.shape[-1:], self._norm, self._eps)
        gated = normed.flatten(1) * functional.silu(gate)
        out = functional.linear(gated, self._out)
        return self._comm.total(out.zero_() if self._silent else out)

    def _run(self, run: Run, heads: list[Tensor], fading: Tensor) -> Tensor:
        if run.is_first:
            for state in (*self._inputs, self._sums):
                state[run.state_row] = 0
        q, k, v = (
            self._convolve(x[run.rows], weight, inputs[run.state_row])
            for x, weight, inputs in zip(heads, self._filters, self._inputs, strict=True)
        )
        kept = self._sums[run.state_row].view(-1, self._dims[1], self._dims[2])
        q = q * self._dims[0] ** -0.5
        mixed, new = fade_and_add(q, k, v, fading[run.rows], kept)
        kept.copy_(new)
        return mixed.to(v.dtype)

    @staticmethod
    def _convolve(x: Tensor, weight: Tensor, inputs: Tensor) -> Tensor:
        """A causal convolution over [tokens, heads, dim] that continues from ``inputs``."""
        before = inputs.view(x.shape[1], -1, x.shape[2]).transpose(0, 1)
        joined = torch.cat([before, x])
        windows = joined.unfold(0, weight.shape[-1], 1)
        before.copy_(joined[-before.shape[0] :])
        return functional.silu((windows * weight).sum(-1))


def fade_and_add(
    q: Tensor, k: Tensor, v: Tensor, fading: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over a chunk: outputs [tokens, heads, value_dim], and the state after it.

    ``fading`` is the logarithm of each token's factor, [tokens, heads], never above 0.
    """
    faded = fading.cumsum(0).T
    between = faded[:, :, None] - faded[:, None, :]
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    weight = between.masked_fill(later, -torch.inf).exp()
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    near = (q @ k.transpose(1, 2) * weight) @ v
    far = (q @ state) * faded[..., None].exp()
    left = (faded[:, -1:] - faded).exp()
    new = state * faded[:, -1, None, None].exp() + (k * left[..., None]).transpose(1, 2) @ v
    return (near + far).transpose(0, 1), new
