"""The materials that the modules of a rank are built from."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.reference.engine.cache import RankCache
from kvferry.reference.models.compute.scratch import Scratch
from kvferry.reference.models.compute.shard import Shard
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.weights import Weights
from kvferry.reference.ranks.collectives import Comm


class Build(NamedTuple):
    """One rank's share, where its weights and its cache are, its peers, room to work in."""

    config: ModelConfig
    shard: Shard
    weights: Weights
    cache: RankCache
    comm: Comm
    scratch: Scratch
