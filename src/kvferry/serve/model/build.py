"""What the modules of a rank are built from."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.serve.cache import Cache
from kvferry.serve.comm import Comm
from kvferry.serve.model.config import ModelConfig
from kvferry.serve.model.scratch import Scratch
from kvferry.serve.model.shard import Shard
from kvferry.serve.weights import Weights


class Build(NamedTuple):
    """One rank's share, where its weights and its cache are, its peers, room to work in."""

    config: ModelConfig
    shard: Shard
    weights: Weights
    cache: Cache
    comm: Comm
    scratch: Scratch
