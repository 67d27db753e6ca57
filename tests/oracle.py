"""An independent oracle of ownership, written from the definition, not from the planner."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import ExplicitSharding, Layout, Tokens
from kvferry.layout.spec import Group, StateRow, Window
from kvferry.plan import Move, Plan, Request

Bools = NDArray[np.bool_]


class Owned(NamedTuple):
    """A product of three masks: layers of the model, units, tokens of the request."""

    layers: Bools
    units: Bools
    tokens: Bools

    def all(self) -> Bools:
        """Return the mask of every coordinate as [layer, unit, token]."""
        return self.layers[:, None, None] & self.units[:, None] & self.tokens


def owned(layout: Layout, rank: int, group: Group, num_tokens: int) -> Owned:
    if isinstance(layout.sharding, ExplicitSharding):
        return _owned_explicitly(layout.sharding, layout, rank, group, num_tokens)
    p = layout.sharding
    tp_rank, cp_rank = rank % p.tp, rank // p.tp % p.cp
    pp_rank = rank // p.tp // p.cp // p.copies
    # Tokens go to a place on the CP axis, and there to one of every ``dcp`` TP ranks in turn.
    turn = cp_rank + p.cp * (tp_rank % p.dcp)
    num_layers = layout.spec.num_layers
    layers = [n in group.layers and _stage(p.stages, p.pp, num_layers, n) == pp_rank
              for n in range(num_layers)]  # fmt: skip
    slot = isinstance(group.kind, StateRow)
    # Ranks that share tokens have the same units.
    parts, part = (p.tp, tp_rank) if slot else (p.tp // p.dcp, tp_rank // p.dcp)
    units = [_on_tp_rank(u, group.units, parts, part) for u in range(group.units)]
    position = np.arange(num_tokens)
    tokens = slot | (position // p.interleave % (p.cp * p.dcp) == turn)
    return Owned(np.array(layers), np.array(units), tokens & _has_entry(group, num_tokens))


def _stage(stages: tuple[int, ...], pp: int, num_layers: int, layer: int) -> int:
    sizes = list(stages) or [num_layers // pp + (i < num_layers % pp) for i in range(pp)]
    return [i for i, size in enumerate(sizes) for _ in range(size)][layer]


def _on_tp_rank(unit: int, units: int, tp: int, tp_rank: int) -> bool:
    # Units are distributed over ranks evenly and in order, or ranks over units if there are more.
    if units >= tp:
        return unit // (units // tp) == tp_rank
    return tp_rank // (tp // units) == unit


def _owned_explicitly(
    sharding: ExplicitSharding, layout: Layout, rank: int, group: Group, num_tokens: int
) -> Owned:
    mine = [h for h in sharding.ranks[rank] if h.group == group.name]
    layers = [n in group.layers and any(n in h.layers for h in mine)
              for n in range(layout.spec.num_layers)]  # fmt: skip
    units = [any(u in h.units for h in mine) for u in range(group.units)]
    slot = isinstance(group.kind, StateRow)
    tokens = np.full(num_tokens, slot)
    for held in mine:
        tokens |= _members(held.tokens, num_tokens)
    return Owned(np.array(layers), np.array(units), tokens & _has_entry(group, num_tokens))


def _has_entry(group: Group, num_tokens: int) -> Bools:
    """Return the mask of the tokens that complete an entry."""
    return np.asarray((np.arange(num_tokens) + 1) % group.tokens_per_entry == 0)


def _members(tokens: Tokens, num_tokens: int) -> Bools:
    """Return the mask of a set's positions: between its ends, with a residue in one of its runs."""
    position = np.arange(num_tokens)
    residue = position % tokens.pattern.period
    in_runs = np.zeros(num_tokens, dtype=bool)
    for run in tokens.pattern.runs:
        in_runs |= (residue >= run.first) & (residue < run.end)
    end = num_tokens if tokens.end is None else tokens.end
    return np.asarray(in_runs & (position >= tokens.first) & (position < end))


def owed_tokens(group: Group, request: Request) -> Bools:
    """Return the mask of positions that the target needs and does not have."""
    n = request.num_tokens
    position = np.arange(n)
    needed = position >= request.prefix
    if isinstance(group.kind, Window):
        needed &= position >= n - group.kind.num_tokens
    if isinstance(group.kind, StateRow):
        needed &= position == n - 1
    return np.asarray(needed)


def assert_exactly_once(plan: Plan, request: Request) -> None:
    """Check that every coordinate a target needs arrives once, from a rank that has it."""
    for group in plan.spec.groups:
        have, want = (
            [owned(layout, rank, group, request.num_tokens) for rank in range(layout.num_ranks)]
            for layout in (plan.source, plan.target)
        )
        held = [mine.all() for mine in have]
        arrived = [np.zeros(mine.all().shape, dtype=np.int64) for mine in want]
        for move in (move for move in plan.moves if move.group == group.name):
            block = _block(plan, group, move, request)
            assert held[move.source][block].all(), f"{move} sends what its source does not have"
            assert move.source_unit == have[move.source].units[: move.units.first].sum()
            assert move.target_unit == want[move.target].units[: move.units.first].sum()
            arrived[move.target][block] += 1
        for target, mine in enumerate(want):
            lacks = mine.all() & owed_tokens(group, request)
            assert (arrived[target] == lacks).all(), f"target {target} of {plan!r}"


def _block(plan: Plan, group: Group, move: Move, request: Request) -> tuple[Any, ...]:
    carried = np.flatnonzero(_members(plan.tokens_of(move, request), request.num_tokens))
    layers = [n for n in group.layers if move.layers.first <= n < move.layers.end]
    units = np.arange(move.units.first, move.units.end)
    return np.ix_(np.array(layers, dtype=np.int64), units, carried)
