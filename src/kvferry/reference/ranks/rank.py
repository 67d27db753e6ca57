"""One rank of an engine: its weights, its cache, its peers, and one step at a time.

A rank decides nothing; it runs the plans it is given, in order, on the thread that calls
``execute``. An ``Extension`` is the part of an integration that lives on every rank, such as a
kvferry endpoint that sends this rank's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.reference.engine.cache import TORCH_DTYPES, RankCache
from kvferry.reference.engine.requests import Sample, StepPlan, StepResult
from kvferry.reference.engine.sampling import sample
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.decoder import Build, Decoder, make_batch
from kvferry.reference.models.shard import Weights, shard_of
from kvferry.reference.options import EngineOptions
from kvferry.reference.ranks.collectives import Comm, Sockets


class Extension:
    """Hooks beside a rank; this base class does nothing.

    Called on the rank's thread, in this order: ``allocate``, ``start``, then ``before`` and
    ``after`` around every step with ``computed`` for each layer between them, and ``close``.
    ``model`` is what other instances must have in common with this one.
    """

    model = ""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed host memory for the cache (not called on a GPU)."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def start(self, cache: RankCache) -> None:
        """Take the cache, once the rank has its model."""

    def before(self, plan: StepPlan) -> None:
        """Prepare a step; ``plan.commands`` are those that the driver's caller posted."""

    def computed(self, plan: StepPlan, layer: int) -> None:
        """Handle a layer whose entries are in this rank's pages (on a GPU: are queued)."""

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        """Finish a step and return notes for the caller.

        Only rank 0 has samples. On a GPU the work is queued, not done.
        """
        return []

    def close(self) -> None:
        """Release everything; the rank ends."""


# Called with the rank's number in the rank's process, so it must be picklable.
MakeExtension = Callable[[int], Extension]


class RankSetup(NamedTuple):
    """Everything that a rank is made from; sent to its process."""

    folder: Path
    options: EngineOptions
    num_pages: int
    extend: MakeExtension


class RankWorker:
    """One rank, ready to run plans."""

    def __init__(self, setup: RankSetup, rank: int, sockets: Sockets) -> None:
        options = setup.options
        config = ModelConfig.load(setup.folder)
        layout = options.layout(config)
        torch.set_num_threads(options.threads)
        self.rank = rank
        self.device = _device(options.device, rank)
        self.extension = setup.extend(rank)
        self._comm = Comm(sockets)
        try:
            self.cache = RankCache(
                layout, rank, setup.num_pages, self.device, self.extension.allocate
            )
            weights = Weights(setup.folder, TORCH_DTYPES[options.dtype], self.device)
            shard = shard_of(config, layout, rank)
            self._model = Decoder(Build(config, shard, weights, self.cache, self._comm))
            self.extension.start(self.cache)
        except BaseException:
            self.close()
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self.extension.before(plan)
        samples: list[Sample] = []
        if plan.works:
            batch = make_batch(plan.works, self.cache.layout.page_tokens, self.device)
            logits = self._model.forward(batch, partial(self.extension.computed, plan))
            if logits is not None:
                samples = sample(logits, [work for work in plan.works if work.sampling])
        return StepResult(samples, self.extension.after(plan, samples))

    def close(self) -> None:
        """Close the extension and leave the other ranks."""
        self.extension.close()
        self._comm.close()


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    # Ranks share GPUs if there are fewer GPUs than ranks.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
