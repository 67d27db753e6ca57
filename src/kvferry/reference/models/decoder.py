"""The whole model as one rank computes it: embedding, its layers, logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.reference.models.batch import StepBatch
from kvferry.reference.models.config import LINEAR
from kvferry.reference.models.layers import Attention, Build, Mlp, Rotary
from kvferry.reference.models.linear_attention import LinearAttention
from kvferry.reference.models.shard import even_share


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
        if isinstance(self._mixer, Attention):
            hidden = hidden + self._mixer(normed, batch, rotary)
        else:
            hidden = hidden + self._mixer(normed, batch)
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
