"""The whole model as one rank computes it: embedding, its layers, logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.reference.models.compute.attention import Attention, Rotary
from kvferry.reference.models.compute.batch import StepBatch
from kvferry.reference.models.compute.build import Build
from kvferry.reference.models.compute.linear_attention import LinearAttention
from kvferry.reference.models.compute.shard import even_share
from kvferry.reference.models.config import LINEAR


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
        """Sum over all ranks' channels."""
        gate, up = functional.linear(hidden, self._up).chunk(2, dim=-1)
        return self._comm.total(functional.linear(functional.silu(gate) * up, self._down))


class Layer:
    """A mixer (attention, or linear attention) and an MLP, each behind a norm."""

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
        """One layer on the residual stream."""
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norms[0], self._eps)
        if isinstance(self._mixer, Attention):
            hidden = hidden + self._mixer(normed, batch, rotary)
        else:
            hidden = hidden + self._mixer(normed, batch)
        normed = functional.rms_norm(hidden, hidden.shape[-1:], self._norms[1], self._eps)
        return hidden + self._mlp(normed)


class Decoder:
    """One rank's stage: ``forward`` gives logits on the lead rank and None elsewhere."""

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
        """Logits of the wanted tokens, [wanted, vocab].

        ``computed`` hears of each layer whose entries are in the cache; on a GPU, when its
        work is queued.
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
        """Each rank knows some of the vocabulary and adds zeros for the rest."""
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
