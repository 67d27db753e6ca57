"""The proof that a plan is right: ``check`` paints what each target would receive.

It shares no step with the planner. For every target it paints each move onto a
dense grid of (token, layer, unit) and demands that each cell of what the target
holds was painted exactly once, by a source that holds it, at the right local
index. Tokens are painted by representatives: between two edges the pattern
repeats with the common period, so one period speaks for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kvferry.errors import BrokenPlan
from kvferry.layout.intervals import Tokens
from kvferry.layout.layout import Holding
from kvferry.plan.plan import Move, Plan


def check(plan: Plan) -> None:
    """Raise ``BrokenPlan`` unless every target unit is covered exactly once."""
    received: dict[tuple[int, str], list[Move]] = {}
    for move in plan.moves:
        _check_ends(plan, move)
        received.setdefault((move.target, move.group), []).append(move)
    for target, holdings in enumerate(plan.wanted):
        for name in {holding.group for holding in holdings}:
            mine = [holding for holding in holdings if holding.group == name]
            _check_target(plan, target, name, mine, received.get((target, name), []))


def _check_ends(plan: Plan, move: Move) -> None:
    """The source holds what it sends, the target what it gets, at the indices stated."""
    layers = plan.spec.group(move.group).layers_in(move.layers)
    if not layers or not len(move.units):
        raise BrokenPlan(f"{move!r} carries nothing")
    ends = (
        ("source", plan.held, move.source, move.source_unit),
        ("target", plan.wanted, move.target, move.target_unit),
    )
    for role, ranks, rank, local_unit in ends:
        if not 0 <= rank < len(ranks):
            raise BrokenPlan(f"{move!r} names {role} {rank}, which does not exist")
        fitting = [holding for holding in ranks[rank] if _fits(move, holding)]
        if not all(any(layer in holding.layers for holding in fitting) for layer in layers):
            raise BrokenPlan(f"{move!r} goes beyond what its {role} holds")
        if local_unit != move.units.first - fitting[0].units.first:
            raise BrokenPlan(f"{move!r} begins at the wrong unit of its {role}")


def _fits(move: Move, holding: Holding) -> bool:
    """Whether the holding has the move's units and tokens, in whatever layers."""
    same_group = holding.group == move.group
    return same_group and holding.units.covers(move.units) and _within(move.tokens, holding.tokens)


def _within(inner: Tokens, outer: Tokens) -> bool:
    if inner.first not in outer or inner.step % outer.step:
        return False
    return outer.end is None or (inner.end is not None and inner.end <= outer.end)


def _check_target(
    plan: Plan, target: int, name: str, holdings: list[Holding], moves: list[Move]
) -> None:
    group = plan.spec.group(name)
    patterns = [move.tokens for move in moves] + [holding.tokens for holding in holdings]
    tokens = np.array(_representatives(patterns), dtype=np.int64)
    layers = np.array(group.layers, dtype=np.int64)
    expected = np.zeros((len(tokens), len(layers), group.units), dtype=np.int32)
    painted = np.zeros_like(expected)
    for holding in holdings:
        _paint(expected, tokens, layers, holding)
    for move in moves:
        _paint(painted, tokens, layers, move)
    if not np.array_equal(expected, painted):
        token, layer, unit = (int(i[0]) for i in np.nonzero(expected != painted))
        raise BrokenPlan(
            f"target {target} would get group {name!r} layer {layers[layer]} unit {unit} "
            f"token {tokens[token]} {painted[token, layer, unit]} times, "
            f"not {expected[token, layer, unit]}"
        )


def _representatives(patterns: Iterable[Tokens]) -> list[int]:
    """Enough positions that patterns which agree on them agree everywhere."""
    distinct = set(patterns)
    period = math.lcm(*(tokens.step for tokens in distinct))
    edges = sorted({0} | {t.first for t in distinct} | {t.end for t in distinct if t.end})
    return sorted({token for edge in edges for token in range(edge, edge + period)})


def _paint(
    grid: np.ndarray[tuple[int, int, int], np.dtype[np.int32]],
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    layers: np.ndarray[tuple[int], np.dtype[np.int64]],
    block: Holding | Move,
) -> None:
    pattern = block.tokens
    inside = (tokens >= pattern.first) & ((tokens - pattern.first) % pattern.step == 0)
    if pattern.end is not None:
        inside &= tokens < pattern.end
    in_layers = (layers >= block.layers.first) & (layers < block.layers.end)
    rows = np.ix_(inside, in_layers, np.arange(block.units.first, block.units.end))
    grid[rows] += 1
