"""The cases that are explored: a quick set with every test run, and a full one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.testing.explore.model import (
    AHEAD,
    CACHED,
    DIRECT,
    LAYERED,
    MODELS,
    ONLY_SLOT,
    SOURCE,
    STAGED,
    STATE,
    TARGETS,
    ExploredModel,
    ModelFault,
)
from kvferry.testing.explore.search import SearchResult, explore


@dataclass(frozen=True)
class Case:
    """A model with the faults that may happen in it."""

    model: ExploredModel
    faults: tuple[ModelFault, ...] = ()

    def run(self, max_states: int = 300_000) -> SearchResult:
        """Explore it."""
        return explore(self.model, self.faults, max_states)

    def __str__(self) -> str:
        order = "in order" if self.model.in_order else "any order"
        names = " ".join(fault.name for fault in self.faults)
        return f"{self.model.name}, {order}, {names or 'no fault'}"


def cases(*, full: bool = False) -> Iterator[Case]:
    """What to explore, one kind of fault at a time.

    The quick set has faults at the source and one target, and gives each
    direction of a link its order where there would be too many worlds; the full
    set has faults everywhere and frames always in any order, and takes hours.
    """
    if full:
        yield from (Case(model) for model in MODELS.values())
        yield from (Case(model, (fault,)) for model in MODELS.values() for fault in ModelFault)
        return
    yield from (Case(model) for model in MODELS.values())
    for model, fault in _QUICK:
        yield Case(replace(model, faults_at=frozenset({SOURCE, TARGETS[0]})), (fault,))


def _in_order(model: ExploredModel) -> ExploredModel:
    return replace(model, in_order=True)


# These fail links, and what then crosses has too many orders for a quick run.
_MANY_ORDERS = frozenset({ModelFault.CUT, ModelFault.TICK, ModelFault.DEADLINE, ModelFault.SILENCE})
# Above 200,000 worlds, or long paths through time: left to the full set.
_LARGE = _MANY_ORDERS | {ModelFault.STALL, ModelFault.KILL_TARGET}
_STAGED = tuple(fault for fault in ModelFault if fault not in _LARGE)
_CACHED = (
    ModelFault.DROP,
    ModelFault.DUPLICATE,
    ModelFault.DELAY,
    ModelFault.CANCEL_TARGET,
    ModelFault.KILL_SOURCE,
)
_ONLY_SLOT = (ModelFault.DROP, ModelFault.FAILED, ModelFault.CANCEL_SOURCE)
_AHEAD = (
    ModelFault.DROP,
    ModelFault.BUSY,
    ModelFault.FAILED,
    ModelFault.STALL,
    ModelFault.KILL_SOURCE,
)

_QUICK = (
    *((_in_order(DIRECT) if fault in _MANY_ORDERS else DIRECT, fault) for fault in ModelFault),
    *((_in_order(STAGED), fault) for fault in _STAGED),
    *((CACHED, fault) for fault in _CACHED),
    *((_in_order(AHEAD), fault) for fault in _AHEAD),
    *((_in_order(ONLY_SLOT), fault) for fault in _ONLY_SLOT),
    (_in_order(STATE), ModelFault.DROP_NOTE),
    (_in_order(LAYERED), ModelFault.KILL_SOURCE),
)
