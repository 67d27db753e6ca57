"""An independent check of a plan: ``check`` counts how often each target unit is written.

It shares no code with the planner. Every move must lie within the shards of its source and of its
target, at the right local unit. Then, for each target, every move is counted on a dense grid of
(token, layer, unit) as large as the target's shards, and each cell must be written exactly once.
Tokens are represented by samples: between two positions where a set begins or ends, ownership
repeats with the common period and changes only where a run begins or ends, so these positions of
one period are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BrokenPlan
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Shard
from kvferry.layout.tokens import Tokens
from kvferry.plan.plan import Move, Plan

Counts = NDArray[np.int32]


def check(plan: Plan) -> None:
    """Raise ``BrokenPlan`` unless every target unit is covered exactly once."""
    received: dict[tuple[int, str], list[Move]] = {}
    for move in plan.moves:
        _check_ends(plan, move)
        received.setdefault((move.target, move.group), []).append(move)
    for target, shards in enumerate(plan.wanted):
        for name in {shard.group for shard in shards}:
            mine = [shard for shard in shards if shard.group == name]
            _check_target(plan, target, name, mine, received.get((target, name), []))


def _check_ends(plan: Plan, move: Move) -> None:
    """Check that source and target hold the move, at the stated units."""
    layers = plan.spec.group(move.group).layers_in(move.layers)
    if not layers or not len(move.units):
        raise BrokenPlan(f"{move!r} has no layers or no units")
    ends = (
        ("source", plan.held, move.source, move.source_unit),
        ("target", plan.wanted, move.target, move.target_unit),
    )
    for role, ranks, rank, local_unit in ends:
        if not 0 <= rank < len(ranks):
            raise BrokenPlan(f"{move!r} names {role} {rank}, which does not exist")
        fitting = [shard for shard in ranks[rank] if _fits(move, shard)]
        if not _all_in(layers, fitting):
            raise BrokenPlan(f"{move!r} goes beyond what its {role} holds")
        if local_unit != move.units.first - fitting[0].units.first:
            raise BrokenPlan(f"{move!r} begins at the wrong unit of its {role}")


def _all_in(layers: tuple[int, ...], shards: Sequence[Shard]) -> bool:
    span = Span(layers[0], layers[-1] + 1)
    if any(shard.layers.covers(span) for shard in shards):
        return True
    return all(any(layer in shard.layers for shard in shards) for layer in layers)


def _fits(move: Move, shard: Shard) -> bool:
    """Return whether the shard has the move's units and tokens, in any layers."""
    same_group = shard.group == move.group
    return same_group and shard.units.covers(move.units) and _within(move.tokens, shard.tokens)


# Cached, because most moves of a plan have one of a few token sets.
@lru_cache(maxsize=1024)
def _within(inner: Tokens, outer: Tokens) -> bool:
    """Return whether every token of one set is in the other."""
    samples = np.array(_sample_tokens((inner, outer)), dtype=np.int64)
    return not (_inside(inner, samples) & ~_inside(outer, samples)).any()


def _check_target(
    plan: Plan, target: int, name: str, shards: list[Shard], moves: list[Move]
) -> None:
    grid = _Grid(plan, name, shards, moves)
    expected, actual = grid.count(shards), grid.count(moves)
    if not np.array_equal(expected, actual):
        token, layer, unit = (int(i[0]) for i in np.nonzero(expected != actual))
        raise BrokenPlan(
            f"target {target} would get group {name!r} layer {grid.layers[layer]} "
            f"unit {grid.units.first + unit} token {grid.tokens[token]} "
            f"{actual[token, layer, unit]} times, not {expected[token, layer, unit]}"
        )


def _sample_tokens(patterns: Iterable[Tokens]) -> list[int]:
    """Return enough positions that patterns which agree on them agree everywhere."""
    distinct = set(patterns)
    period = math.lcm(*(tokens.pattern.period for tokens in distinct))
    edges = {0} | {t.first for t in distinct} | {t.end for t in distinct if t.end}
    borders = {
        at + border
        for tokens in distinct
        for run in tokens.pattern.runs
        for border in (run.first, run.end)
        for at in range(0, period, tokens.pattern.period)
    }
    # The first occurrence of each border from each edge on.
    return sorted(edges | {edge + (border - edge) % period for edge in edges for border in borders})


def _inside(tokens: Tokens, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which positions are in a set."""
    residues = positions % tokens.pattern.period
    inside = np.zeros(len(positions), dtype=np.bool_)
    for run in tokens.pattern.runs:
        inside |= (run.first <= residues) & (residues < run.end)
    inside &= positions >= tokens.first
    if tokens.end is not None:
        inside &= positions < tokens.end
    return inside


class _Grid:
    """The part of one group that one target holds, with sampled tokens."""

    def __init__(
        self, plan: Plan, name: str, shards: Sequence[Shard], moves: Sequence[Move]
    ) -> None:
        group = plan.spec.group(name)
        held = {layer for shard in shards for layer in group.layers_in(shard.layers)}
        patterns = [shard.tokens for shard in shards] + [move.tokens for move in moves]
        self.tokens = np.array(_sample_tokens(patterns), dtype=np.int64)
        self.layers = np.array(sorted(held), dtype=np.int64)
        self.units = Span(
            min(shard.units.first for shard in shards),
            max(shard.units.end for shard in shards),
        )

    def count(self, blocks: Sequence[Shard] | Sequence[Move]) -> Counts:
        """Return how many of the blocks contain each cell."""
        shape = (len(self.tokens), len(self.layers), len(self.units))
        counts = np.zeros(shape, dtype=np.int32)
        for block in blocks:
            first, end = np.searchsorted(self.layers, (block.layers.first, block.layers.end))
            units = slice(block.units.first - self.units.first, block.units.end - self.units.first)
            counts[_inside(block.tokens, self.tokens), first:end, units] += 1
        return counts
