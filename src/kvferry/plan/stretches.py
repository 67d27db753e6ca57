"""Stretches: a move's tokens as runs that both of its ends keep at a constant distance.

The tokens of a move are some of those that each end holds. Their local indices at an end advance by
a constant within a stretch, and by more where the end holds others between. Two ends that deal
tokens out alike have a single stretch, and so has one token in every few; blocks of several tokens
have a stretch each.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np

from kvferry.layout.tokens import MAX_POSITION, Pattern, Tokens
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Int64s
from kvferry.plan.token_index import num_below


class Stretches(NamedTuple):
    """The stretches of a move, in order.

    ``starts`` is the index of a stretch's first token among the move's tokens. ``source`` and
    ``target`` are its local indices, counted from those of the move's first token. ``advance`` is
    how far the next token is at each end. No such stretch has more than ``longest`` tokens.
    """

    starts: Int64s
    source: Int64s
    target: Int64s
    advance: Stride
    longest: int


class _Cycle(NamedTuple):
    """The stretches of one period: the index and position of the first token of each."""

    pattern: Pattern
    starts: Int64s
    position: Int64s
    advance: Stride
    longest: int

    @property
    def endless(self) -> bool:
        """Whether all tokens are one stretch."""
        return self.longest == MAX_POSITION


@lru_cache(maxsize=1024)
def _cycle(tokens: Pattern, source: Pattern, target: Pattern) -> _Cycle:
    """Return the stretches of a pattern's period, of which the ends' periods are divisors."""
    period = lcm(tokens.period, source.period, target.period)
    pattern = tokens.repeated(period)
    runs = pattern.runs
    counts = np.cumsum([0, *map(len, runs)], dtype=np.int64)
    following = [*(run.first for run in runs[1:]), period + runs[0].first]
    gaps = [
        Stride(source.count(run.end - 1, first), target.count(run.end - 1, first))
        for run, first in zip(runs, following, strict=True)
    ]
    # In a run, both ends hold every token. Runs of one token have the distance of the others.
    single = all(len(run) == 1 for run in runs)
    advance = Counter(gaps).most_common(1)[0][0] if single else Stride(1, 1)
    breaks = np.array([gap != advance for gap in gaps])
    if not breaks.any():
        zero = np.zeros(1, dtype=np.int64)
        return _Cycle(pattern, zero, zero, advance, MAX_POSITION)
    starts = np.flatnonzero(np.concatenate(([True], breaks[:-1])))
    index = counts[starts]
    position = np.array([run.first for run in runs], dtype=np.int64)[starts]
    longest = int(np.diff(np.append(index, counts[-1])).max())
    return _Cycle(pattern, index, position, advance, longest)


def stretches(tokens: Tokens, source: Pattern, target: Pattern) -> Stretches:
    """Return the stretches of a finite, non-empty set between two ends that hold all of it."""
    cycle = _cycle(tokens.pattern, source, target)
    if cycle.endless:
        zero = np.zeros(1, dtype=np.int64)
        return Stretches(zero, zero, zero, cycle.advance, MAX_POSITION)
    pattern = cycle.pattern
    first = pattern.below(tokens.first)
    end = first + tokens.num_tokens
    density = pattern.density
    periods = np.arange(first // density, (end - 1) // density + 1, dtype=np.int64)[:, None]
    index = (periods * density + cycle.starts).ravel()
    position = (periods * pattern.period + cycle.position).ravel()
    # The first stretch may have begun before the set.
    some = slice(np.searchsorted(index, first, "right") - 1, np.searchsorted(index, end))
    index, position = index[some], position[some]
    index[0], position[0] = first, tokens.first
    at_source, at_target = (num_below(held, position) for held in (source, target))
    return Stretches(
        index - first,
        at_source - at_source[0],
        at_target - at_target[0],
        cycle.advance,
        cycle.longest,
    )
