"""Token classes: the parts into which the token sets of all ranks cut the positions.

Between two positions where a set begins or ends, membership repeats with the common period, and
changes only where a run begins or ends. The positions with the same members are a class. Tokens are
never enumerated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kvferry.errors import ReasonCode, Refused
from kvferry.layout.intervals import Span
from kvferry.layout.tokens import EVERY, MAX_RUNS, Pattern, Tokens

# Limit on the token classes of one group. Large coprime sizes multiply; no real layout has them,
# and a hostile one must not take minutes to plan.
MAX_TOKEN_CLASSES = 1024


def token_classes(sets: Sequence[Tokens], group: str) -> list[Tokens]:
    """Return disjoint token sets such that each of ``sets`` is a union of some of them."""
    distinct = list(dict.fromkeys(sets))
    patterns = dict.fromkeys(tokens.pattern for tokens in distinct)
    period = math.lcm(*(pattern.period for pattern in patterns))
    num_runs = sum(len(p.runs) * (period // p.period) for p in patterns if p != EVERY)
    _check_num_runs(num_runs, group)
    whole = [(tokens, tokens.pattern.repeated(period)) for tokens in distinct]
    cuts = sorted({0, period, *(edge for _, pattern in whole for edge in _edges(pattern))})
    masks = _masks([pattern for _, pattern in whole], cuts)
    borders = sorted({0, *(border for tokens in distinct for border in _borders(tokens))})
    classes: list[Tokens] = []
    for start, end in zip(borders, [*borders[1:], None], strict=True):
        runs: dict[int, list[Span]] = {}
        active = sum(1 << bit for bit, tokens in enumerate(distinct) if _reaches(tokens, start))
        for mask, (first, stop) in zip(masks, itertools.pairwise(cuts), strict=True):
            if mask & active:
                runs.setdefault(mask & active, []).append(Span(first, stop))
        found = [_class(Pattern.of(period, its), start, end) for its in runs.values()]
        classes += sorted(
            (one for one in found if one.end is None or one.first < one.end),
            key=lambda one: one.first,
        )
        if len(classes) > MAX_TOKEN_CLASSES:
            raise Refused.because(
                ReasonCode.TOO_LARGE,
                f"group {group!r} would have more than {MAX_TOKEN_CLASSES} token classes; "
                f"use context-parallel sizes with a common divisor",
            )
    return classes


def _check_num_runs(num_runs: int, group: str) -> None:
    """Refuse sets whose common period has too many runs."""
    if num_runs > MAX_RUNS:
        raise Refused.because(
            ReasonCode.TOO_LARGE,
            f"group {group!r} would have {num_runs} runs of tokens in each common period (limit "
            f"{MAX_RUNS}); use context-parallel sizes and interleaves with a common divisor",
        )


def _edges(pattern: Pattern) -> Iterator[int]:
    return (edge for run in pattern.runs for edge in (run.first, run.end))


def _masks(patterns: Sequence[Pattern], cuts: list[int]) -> list[int]:
    """Return for each interval between cuts the bits of the patterns that contain it."""
    masks = [0] * (len(cuts) - 1)
    for bit, pattern in enumerate(patterns):
        for run in pattern.runs:
            for place in range(bisect_left(cuts, run.first), bisect_left(cuts, run.end)):
                masks[place] |= 1 << bit
    return masks


def _borders(tokens: Tokens) -> Iterator[int]:
    """Return where a set begins, unless its pattern has nothing before, and where it ends."""
    if tokens.pattern.below(tokens.first):
        yield tokens.first
    if tokens.end is not None:
        yield tokens.end


def _reaches(tokens: Tokens, start: int) -> bool:
    """Return whether a set has its pattern's positions from this border to the next."""
    begun = tokens.first <= start or not tokens.pattern.below(tokens.first)
    return begun and (tokens.end is None or start < tokens.end)


def _class(pattern: Pattern, start: int, end: int | None) -> Tokens:
    first = pattern.member(pattern.below(start))
    return Tokens(first if end is None else min(first, end), end, pattern)
