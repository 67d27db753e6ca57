"""The materials that the modules of a rank are built from."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.serve.engine.cache import Cache
from kvferry.serve.models.compute.scratch import Scratch
from kvferry.serve.models.compute.shard import Shard
from kvferry.serve.models.config import ModelConfig
from kvferry.serve.models.weights import Weights
from kvferry.serve.ranks.collectives import Comm


class Build(NamedTuple):
    """One rank's share, where its weights and its cache are, its peers, room to work in."""

    config: ModelConfig
    shard: Shard
    weights: Weights
    cache: Cache
    comm: Comm
    scratch: Scratch
