"""Requests run to their end, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.layout.layout import Parallel
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import (
    Admitted,
    EngineRequest,
    FinishReason,
    Output,
    Produced,
    Sampling,
    StepPlan,
)
from kvferry.reference.options import EngineOptions
from kvferry.reference.ranks.rank import Extension, MakeExtension

MAX_STEPS = 2000
ALL = Sampling(logprobs=257)
# Three lengths: within a page, on a page's end, over several chunks.
PROMPTS = tuple(
    tuple((start + 37 * i * i + 11 * i) % 256 for i in range(length))
    for start, length in ((1, 5), (2, 32), (3, 150))
)


@dataclass
class Answer:
    """An engine's outputs for one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    tops: list[dict[int, float]] = field(default_factory=list)
    prefix: int = 0

    def take(self, output: Output) -> None:
        match output:
            case Produced():
                self.tokens.append(output.sample.token)
                self.text += output.text
                self.finish = output.finish
                self.tops.append(output.sample.top)
            case Admitted():
                self.prefix = output.prefix


def small(parallel: Parallel | None = None, **changes: Any) -> EngineOptions:
    """Options under which tests are quick and limits are near."""
    fields: dict[str, Any] = {"cache_tokens": 2048, "max_requests": 16, "step_tokens": 96} | changes
    if parallel is not None:
        fields["tp"] = parallel.tp
    return EngineOptions(**fields)


def engine_of(
    folder: Path,
    parallel: Parallel = Parallel(),  # noqa: B008 - a frozen value
    extend: MakeExtension = Extension,
    **changes: Any,
) -> Engine:
    return Engine(folder, small(parallel=parallel, **changes), extend=extend)


def drain(engine: Engine) -> dict[str, Answer]:
    """Step until nothing is left."""
    answers: dict[str, Answer] = {}
    for _ in range(MAX_STEPS):
        for output in engine.step():
            if isinstance(output, Produced | Admitted):
                answers.setdefault(output.request, Answer()).take(output)
        engine.scheduler.blocks.check()
        if engine.idle:
            return answers
    raise AssertionError(f"not done after {MAX_STEPS} steps")


def ask(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    """All of them at once; their answers in order."""
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    assert engine.scheduler.blocks.num_used == 0
    return [answers[request.id] for request in requests]


def requests(max_tokens: int = 12, sampling: Sampling = ALL, **fields: Any) -> list[EngineRequest]:
    return [
        EngineRequest(
            id=f"r{i}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            ignore_end=True,
            **fields,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def demand_equal(one: Sequence[Answer], two: Sequence[Answer], tolerance: float = 2e-3) -> None:
    """The same tokens from (nearly) the same probabilities."""
    for a, b in zip(one, two, strict=True):
        assert a.tokens == b.tokens
        for here, there in zip(a.tops, b.tops, strict=True):
            assert here.keys() == there.keys()
            assert max(abs(here[token] - there[token]) for token in here) < tolerance


class Watching(Extension):
    """Keeps the request and the tokens of every work that its rank was given."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.works: list[tuple[str, int, int]] = []

    def before(self, plan: StepPlan) -> None:
        self.works += [(work.request, work.first, work.end) for work in plan.works]


def works_of(engine: Engine, request: str | None = None) -> list[tuple[int, int]]:
    """The tokens that rank 0 of an engine extended by ``Watching`` ran, of one request or all."""
    extension = engine.ranks.worker.extension
    assert isinstance(extension, Watching)
    return [(first, end) for name, first, end in extension.works if request in (None, name)]


class FileBacked:
    """Makes extensions whose cache memory is a file, so that a test can reach every rank's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> Extension:
        return _FileBacked(rank, self.path(rank))

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}"

    def memory(self, rank: int) -> NDArray[np.uint8]:
        return np.memmap(self.path(rank), dtype=np.uint8, mode="r+")


class _FileBacked(Extension):
    def __init__(self, rank: int, path: Path) -> None:
        super().__init__(rank)
        self.path = path

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.memmap(self.path, dtype=np.uint8, mode="w+", shape=(num_bytes,))
