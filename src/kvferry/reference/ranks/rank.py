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

from kvferry import Layout
from kvferry.reference.engine.cache import RankCache, zeroed
from kvferry.reference.engine.requests import Sample, SampleFailed, StepPlan, StepResult
from kvferry.reference.engine.sampling import sample
from kvferry.reference.models.batch import make_batch
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.decoder import Build, Decoder, Scratch
from kvferry.reference.models.shard import shard_of
from kvferry.reference.models.weights import Weights
from kvferry.reference.ranks.collectives import RankLinks, connect


class Extension:
    """Hooks beside a rank; this base class does nothing.

    Called on the rank's thread, in this order: ``allocate``, ``start``, then ``before`` and
    ``after`` around every step with ``computed`` for each layer between them, and ``close``.
    """

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed host memory for the cache (not called on a GPU)."""
        return zeroed(num_bytes)

    def start(self, cache: RankCache) -> None:
        """Take the cache, once all ranks are connected."""

    def before(self, plan: StepPlan) -> None:
        """Prepare a step; ``plan.commands`` are those that the driver's caller posted."""

    def computed(self, plan: StepPlan, layer: int) -> None:
        """Handle a layer whose entries are in this rank's pages (on a GPU: are queued)."""

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """Finish a step and return notes for the caller.

        Only the lead rank has samples and failures. On a GPU the work is queued, not done.
        """
        return []

    def close(self) -> None:
        """Release everything; the rank ends."""


# Called with the rank's number in the rank's process, so it must be picklable.
MakeExtension = Callable[[int], Extension]


def no_extension(rank: int) -> Extension:
    """Return an extension that does nothing."""
    return Extension()


class RankSetup(NamedTuple):
    """Everything that a rank is made from; sent to its process."""

    folder: Path
    config: ModelConfig
    layout: Layout
    num_pages: int
    num_rows: int
    device: str
    dtype: torch.dtype
    threads: int
    timeout_s: float
    lost_s: float
    extend: MakeExtension


class RankWorker:
    """One rank, ready to run plans."""

    def __init__(self, setup: RankSetup, rank: int, links: RankLinks) -> None:
        torch.set_num_threads(setup.threads)
        self.rank = rank
        self.device = _device(setup.device, rank)
        shard = shard_of(setup.config, setup.layout, rank)
        self.extension = setup.extend(rank)
        self.cache = RankCache(
            setup.layout,
            rank,
            num_pages=setup.num_pages,
            num_rows=setup.num_rows,
            device=self.device,
            allocate=self.extension.allocate,
        )
        self._comm = connect(shard, self.device, links, setup.lost_s)
        try:
            with Weights(setup.folder, setup.dtype, self.device) as weights:
                scratch = Scratch(setup.dtype, self.device)
                self._model = Decoder(
                    Build(setup.config, shard, weights, self.cache, self._comm, scratch)
                )
            self.extension.start(self.cache)
        except BaseException:
            self.close()
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self.extension.before(plan)
        samples, failures = self._run(plan) if plan.works else ([], [])
        notes = self.extension.after(plan, samples, failures)
        return StepResult(samples, failures, notes)

    def _run(self, plan: StepPlan) -> tuple[list[Sample], list[SampleFailed]]:
        batch = make_batch(plan.works, self.cache.layout.page_tokens, self.device)
        logits = self._model.forward(batch, partial(self.extension.computed, plan))
        if logits is None:
            return [], []
        return sample(logits, [work for work in plan.works if work.sampling is not None])

    def close(self) -> None:
        """Close the extension and leave the other ranks."""
        self.extension.close()
        self._comm.close()


def _device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
