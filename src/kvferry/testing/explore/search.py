"""Breadth first through every world that can be reached, each once.

Worlds are compared in full, never by a hash alone, so merging loses nothing.
Breadth first, a broken promise is found on a shortest path to it.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.testing.explore.catalogue import BrokenModel, Catalogue
from kvferry.testing.explore.model import ExploredModel, ModelFault
from kvferry.testing.explore.steps import (
    Step,
    demand_done,
    describe,
    due,
    faults,
    first_world,
    leftovers,
    possible,
    take,
)
from kvferry.testing.explore.world import ModelWorld


@dataclass(frozen=True)
class ModelViolation:
    """A broken promise and a shortest way to it."""

    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"{number:3}. {line}" for number, line in enumerate(self.trace, 1))
        return "\n".join((self.message, *lines))


@dataclass(frozen=True)
class SearchResult:
    """What an exploration saw. ``complete``: every reachable world was, and none was bad."""

    states: int
    steps: int
    terminals: int
    machine_states: int
    complete: bool
    violation: ModelViolation | None = None


class Search:
    """One exploration. ``parents`` remembers how each world was first reached."""

    def __init__(self, model: ExploredModel, kinds: Iterable[ModelFault]) -> None:
        self.catalogue = Catalogue(model)
        self.kinds = frozenset(kinds)
        self.first = first_world(self.catalogue)
        self.parents: dict[ModelWorld, tuple[ModelWorld, Step] | None] = {self.first: None}
        self.num_steps = 0
        self.num_terminals = 0

    def run(self, max_states: int) -> SearchResult:
        """Explore until all is seen, a promise is broken, or there are too many worlds."""
        # Worlds are values that stay, and looking for cycles among them takes a fifth of the time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run(max_states)
        finally:
            if collecting:
                gc.enable()

    def _run(self, max_states: int) -> SearchResult:
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
        if not steps and leftovers(self.catalogue, world):
            steps.append(("time", 0, None))
        elif not steps:
            self.num_terminals += 1
            demand_done(world)
        steps += possible(self.catalogue, world)
        steps += faults(self.catalogue, world, self.kinds)
        return steps

    def _violation(
        self, world: ModelWorld, step: Step | None, broken: BrokenModel
    ) -> ModelViolation:
        path = [step] if step else []
        while (parent := self.parents[world]) is not None:
            world, before = parent
            path.append(before)
        trace = tuple(describe(self.catalogue, one) for one in reversed(path))
        return ModelViolation(str(broken), trace)

    def _result(self, complete: bool, violation: ModelViolation | None = None) -> SearchResult:
        return SearchResult(
            states=len(self.parents),
            steps=self.num_steps,
            terminals=self.num_terminals,
            machine_states=len(self.catalogue.runners),
            complete=complete,
            violation=violation,
        )


def explore(
    model: ExploredModel, faults: Iterable[ModelFault] = (), max_states: int = 300_000
) -> SearchResult:
    """Every interleaving of the model with at most ``model.max_faults`` of those faults."""
    return Search(model, faults).run(max_states)
