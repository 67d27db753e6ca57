"""A rank of an engine: its weights, its cache, its peers, and one step at a time.

A rank decides nothing. It runs the plans it is given, in order, on the thread
that calls ``execute``. An extension may accompany it: the part of an integration
that lives on every rank, such as a kvferry endpoint that sends this rank's pages.
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
from kvferry.reference.engine.sampling import sample
from kvferry.reference.engine.steps import Sample, SampleFailed, StepPlan, StepResult
from kvferry.reference.models.compute.batch import make_batch
from kvferry.reference.models.compute.build import Build
from kvferry.reference.models.compute.decoder import Decoder
from kvferry.reference.models.compute.scratch import Scratch
from kvferry.reference.models.compute.shard import shard_of
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.weights import Weights
from kvferry.reference.ranks.collectives import connect


class Extension:
    """What may be added to a rank. This one adds nothing; override what you need.

    Called on the rank's own thread, in this order: ``allocate``, ``start``, then
    ``before`` and ``after`` around every step with ``computed`` for each layer between
    them, and ``close``.
    """

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory for the cache (not asked for on a GPU)."""
        return zeroed(num_bytes)

    def start(self, cache: RankCache) -> None:
        """The cache is there and all ranks have met."""

    def before(self, plan: StepPlan) -> None:
        """A step begins; ``plan.commands`` are what the driver's caller posted."""

    def computed(self, plan: StepPlan, layer: int) -> None:
        """That layer's entries of the step are in this rank's pages; on a GPU, queued."""

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """The step's entries are in this rank's pages; answer with notes for the caller.

        Only the lead rank has samples and failures to sample. On a GPU the work is queued, not
        done. The first work of a request begins behind its cached prefix, if it has one.
        """
        return []

    def close(self) -> None:
        """The rank ends."""


# Called with the rank's number in the rank's process, so it must be picklable.
MakeExtension = Callable[[int], Extension]


def no_extension(rank: int) -> Extension:
    """For an engine that works by itself."""
    return Extension()


class RankSetup(NamedTuple):
    """What every rank of an instance is made from. Sent to its process."""

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
    """One rank, ready to run plans. ``cache`` is its memory."""

    def __init__(self, setup: RankSetup, rank: int, folder: Path) -> None:
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
        self._comm = connect(shard, self.device, folder, setup.timeout_s)
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
        """Leave the other ranks."""
        self.extension.close()
        self._comm.close()


def _device(name: str, rank: int) -> torch.device:
    """On a host with GPUs each rank has its own."""
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
