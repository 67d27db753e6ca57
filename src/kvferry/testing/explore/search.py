"""Breadth-first search through every state of a model, each visited once.

States are compared in full, never by a hash alone, so merging them loses nothing. Because the
search goes breadth first, a violation comes with a shortest path to it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.testing.explore.catalogue import BrokenModel, Catalogue
from kvferry.testing.explore.model import PEERS, ExploredModel, ModelFault
from kvferry.testing.explore.steps import Step, describe, due, faults, possible, take
from kvferry.testing.explore.world import ModelWorld, Stage


@dataclass(frozen=True)
class ModelViolation:
    """A broken promise and a shortest path to it."""

    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"{number:3}. {line}" for number, line in enumerate(self.trace, 1))
        return "\n".join((self.message, *lines))


@dataclass(frozen=True)
class SearchResult:
    """Counts of an exploration. ``complete`` if every reachable state was visited and is good."""

    states: int
    steps: int
    terminals: int
    machine_states: int
    complete: bool
    violation: ModelViolation | None = None


class Search:
    """One exploration. ``parents`` has each visited state and how it was first reached."""

    def __init__(self, model: ExploredModel, kinds: Iterable[ModelFault]) -> None:
        self.catalogue = Catalogue(model)
        self.kinds = frozenset(kinds)
        self.first = ModelWorld.first(self.catalogue)
        self.parents: dict[ModelWorld, tuple[ModelWorld, Step] | None] = {self.first: None}
        self.num_steps = 0
        self.num_terminals = 0

    def run(self, max_states: int) -> SearchResult:
        """Explore until everything is visited, a promise is broken, or the limit is reached."""
        queue = deque([self.first])
        while queue:
            if len(self.parents) > max_states:
                return self._result(complete=False)
            world = queue.popleft()
            step: Step | None = None
            try:
                for step in self._steps(world):
                    after = take(self.catalogue, world, step)
                    self.num_steps += 1
                    if after not in self.parents:
                        self.parents[after] = (world, step)
                        queue.append(after)
                step = None
            except BrokenModel as broken:
                return self._result(complete=False, violation=self._violation(world, step, broken))
        return self._result(complete=True)

    def _steps(self, world: ModelWorld) -> list[Step]:
        steps = list(due(self.catalogue, world))
        if not steps and world.leftovers():
            steps.append(("time", 0, None))
        elif not steps:
            self.num_terminals += 1
            _check_end(world)
        steps += possible(self.catalogue.model, world)
        steps += faults(self.catalogue, world, self.kinds)
        return steps

    def _violation(
        self, world: ModelWorld, step: Step | None, broken: BrokenModel
    ) -> ModelViolation:
        path = [step] if step else []
        while (parent := self.parents[world]) is not None:
            world, before = parent
            path.append(before)
        return ModelViolation(str(broken), tuple(map(describe, reversed(path))))

    def _result(self, complete: bool, violation: ModelViolation | None = None) -> SearchResult:
        return SearchResult(
            states=len(self.parents),
            steps=self.num_steps,
            terminals=self.num_terminals,
            machine_states=self.catalogue.num_states,
            complete=complete,
            violation=violation,
        )


def _check_end(world: ModelWorld) -> None:
    """Check that everybody is Done at the end, unless a fault excuses it."""
    if not world.excused and any(stage is not Stage.DONE for stage in world.stages):
        stages = ", ".join(f"{PEERS[i]} {stage.name}" for i, stage in enumerate(world.stages))
        raise BrokenModel(f"not everybody is Done at the end: {stages}")


def explore(
    model: ExploredModel, faults: Iterable[ModelFault] = (), max_states: int = 300_000
) -> SearchResult:
    """Visit every interleaving of the model with at most ``model.max_faults`` of these faults."""
    # The states are values that stay; scanning them for cycles would take a fifth of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Search(model, faults).run(max_states)
    finally:
        if collecting:
            gc.enable()
