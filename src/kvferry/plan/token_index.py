"""Positions and local indices of many tokens at once, as arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvferry.layout.tokens import Pattern, Tokens
from kvferry.plan.places import Int64s


def positions_of(tokens: Tokens) -> Int64s:
    """Return the positions of a finite set, ascending."""
    pattern = tokens.pattern
    if pattern.period == 1:
        return np.arange(tokens.first, tokens.end, dtype=np.int64)
    first = pattern.below(tokens.first)
    index = np.arange(first, first + tokens.num_tokens, dtype=np.int64)
    firsts, counts = _runs(pattern)
    periods, rest = np.divmod(index, counts[-1])
    place = np.searchsorted(counts, rest, "right") - 1
    return np.asarray(periods * pattern.period + firsts[place] + rest - counts[place])


def num_below(pattern: Pattern, positions: Int64s) -> Int64s:
    """Return the number of members below each position: ``Pattern.below`` of an array."""
    if pattern.period == 1:
        return positions
    periods, residues = np.divmod(positions, pattern.period)
    firsts, counts = _runs(pattern)
    place = np.searchsorted(firsts, residues, "right") - 1
    inside = np.minimum(residues - firsts[place], counts[place + 1] - counts[place])
    return np.asarray(periods * counts[-1] + np.where(place < 0, 0, counts[place] + inside))


@lru_cache(maxsize=1024)
def _runs(pattern: Pattern) -> tuple[Int64s, Int64s]:
    """Return where each run begins, and the number of members before each run and in all."""
    firsts = np.array([run.first for run in pattern.runs], dtype=np.int64)
    return firsts, np.cumsum([0, *map(len, pattern.runs)], dtype=np.int64)
