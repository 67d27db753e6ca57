"""The cases to explore: a quick set for every test run, and a full one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.testing.explore.model import MODELS, SOURCE, TARGETS, ExploredModel, ModelFault
from kvferry.testing.explore.search import SearchResult, explore


@dataclass(frozen=True)
class Case:
    """A model with the faults that may happen in it."""

    model: ExploredModel
    faults: tuple[ModelFault, ...] = ()

    def run(self, max_states: int = 300_000) -> SearchResult:
        """Explore the case."""
        return explore(self.model, self.faults, max_states)

    def __str__(self) -> str:
        order = "in order" if self.model.in_order else "any order"
        names = " ".join(fault.name for fault in self.faults)
        return f"{self.model.name}, {order}, {names or 'no fault'}"


def cases(*, full: bool = False) -> Iterator[Case]:
    """Yield the cases, with one kind of fault each.

    The quick set has faults at the source and one target, and delivers each link's frames in order
    where there would be too many states. The full set has faults everywhere, delivers frames in any
    order, and takes hours.
    """
    yield from (Case(model) for model in MODELS.values())
    if full:
        yield from (Case(model, (fault,)) for model in MODELS.values() for fault in ModelFault)
        return
    for name, (kinds, any_order) in _QUICK.items():
        model = replace(MODELS[name], faults_at=frozenset({SOURCE, TARGETS[0]}))
        for fault in kinds:
            yield Case(replace(model, in_order=fault not in any_order), (fault,))


_F = ModelFault
# These break links; the frames that cross afterwards have too many orders for a quick run.
_MANY_ORDERS = frozenset({_F.CUT, _F.TICK, _F.DEADLINE, _F.SILENCE})
# Above 200,000 states or with long paths through time: only in the full set.
_LARGE = _MANY_ORDERS | {_F.STALL, _F.KILL_TARGET}
_CACHED = (_F.DROP, _F.DUPLICATE, _F.DELAY, _F.CANCEL_TARGET, _F.KILL_SOURCE)

# For each model: its faults, and those of them with which frames come in any order.
_QUICK: dict[str, tuple[tuple[ModelFault, ...], frozenset[ModelFault]]] = {
    "direct": (tuple(ModelFault), frozenset(ModelFault) - _MANY_ORDERS),
    "staged": (tuple(fault for fault in ModelFault if fault not in _LARGE), frozenset()),
    "cached": (_CACHED, frozenset(_CACHED)),
    "early": ((_F.DROP, _F.BUSY, _F.FAILED, _F.STALL, _F.KILL_SOURCE), frozenset()),
    "only-slot": ((_F.DROP, _F.FAILED, _F.CANCEL_SOURCE), frozenset()),
    "state": ((_F.DROP_NOTE,), frozenset()),
    "layered": ((_F.KILL_SOURCE,), frozenset()),
}
