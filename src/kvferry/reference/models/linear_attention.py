"""Gated linear attention: a layer whose cache of a request is one row of fixed size.

Each head has a matrix S that every token decays and adds to,

    S[t] = exp(g[t]) · S[t-1] + k[t]ᵀ v[t]        o[t] = q[t] S[t]

with q, k and v first passed through a short causal convolution. The request's row keeps S and
the last inputs of the convolutions. A chunk is computed at once: its tokens see each other
through the matrix of decays between them, and everything before the chunk through S.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.reference.models.batch import StateRun, StepBatch
from kvferry.reference.models.config import STATE
from kvferry.reference.models.layers import Build, scaled


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
        # All ranks that hold the same heads keep their state, but only one adds to the sum.
        replicas = max(1, comm.tp // config.linear.heads)
        self._is_replica = shard.tp_rank % replicas != 0
        self._comm = comm

    def __call__(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """Run each request's tokens through its state."""
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
