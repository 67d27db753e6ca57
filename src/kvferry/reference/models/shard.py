"""A rank's share of a model: which heads and channels, and the weights of them.

KV heads come from the layout of the cache. Query heads follow the KV heads they read;
ranks that hold the same KV head divide its query heads among them. MLP channels, which the cache
does not know, are split evenly. ``model.safetensors`` is mapped, and
only the slices that a rank computes with are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvferry import InputError, Layout, Span
from kvferry.reference.models.config import ModelConfig

FILE = "model.safetensors"


class ModelShard(NamedTuple):
    """Spans of heads and MLP channels that one rank computes."""

    heads: Span
    kv_heads: Span
    channels: Span


def even_share(total: int, parts: int, part: int) -> Span:
    """Return one part of ``total``; the first parts are one larger if it does not divide."""
    base, extra = divmod(total, parts)
    first = part * base + min(part, extra)
    return Span(first, first + base + (part < extra))


def shard_of(config: ModelConfig, layout: Layout, rank: int) -> ModelShard:
    """Return one rank's share."""
    tp = layout.num_ranks
    # Every layer is alike.
    kv_heads = layout.rank_shards(rank)[0].units
    per_kv, replicas = config.heads // config.kv_heads, max(1, tp // config.kv_heads)
    first = kv_heads.first * per_kv
    heads = even_share(len(kv_heads) * per_kv, replicas, rank % replicas)
    return ModelShard(
        heads=Span(first + heads.first, first + heads.end),
        kv_heads=kv_heads,
        channels=even_share(config.intermediate, tp, rank),
    )


class Weights:
    """The tensors of one model folder, open for reading."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._path = folder / FILE
        try:
            # safetensors has no types for its handles.
            file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self._path} can't be read ({error}); download the model again"
            ) from None
        self._file = file
        self._names = frozenset(file.keys())

    def rows(self, name: str, span: Span | None = None) -> Tensor:
        """Return the outputs ``span`` of a matrix or elements of a vector; by default all."""
        return self._load(name, slice(span.first, span.end) if span else slice(None))

    def columns(self, name: str, span: Span) -> Tensor:
        """Return the inputs ``span`` of a matrix."""
        return self._load(name, (slice(None), slice(span.first, span.end)))

    def stacked(self, parts: Sequence[tuple[str, Span]]) -> Tensor:
        """Return rows of several matrices as one matrix, for a single product."""
        return torch.cat([self.rows(name, span) for name, span in parts])

    def _load(self, name: str, where: Any) -> Tensor:
        name += ".weight"
        if name not in self._names:
            raise InputError(f"{self._path} has no tensor {name!r}; it does not fit config.json")
        part: Tensor = self._file.get_slice(name)[where]
        # Always copy: no tensor may keep the mapped file alive.
        return part.to(self.device, self.dtype, copy=True).contiguous()
