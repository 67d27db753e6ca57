"""Sets of token positions: periodic patterns, and their parts between two positions.

Context parallelism of size ``c`` with an interleave of ``k`` deals tokens out in blocks of ``k``:
rank ``r`` holds the tokens with ``t // k % c == r``. That is one run of ``k`` positions in every
``c * k``. Any intersection, union or difference of such sets is again some runs in a period, at
most the least common multiple of theirs, so ``Pattern`` describes all of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from math import lcm

import msgspec

from kvferry.errors import InputError
from kvferry.layout.intervals import Span

# Positions are 64-bit integers, with room for one more period.
MAX_POSITION = 1 << 62
# Limit on the runs of a pattern, because most operations cost as much.
MAX_RUNS = 1 << 14


class Pattern(msgspec.Struct, frozen=True, array_like=True):
    """The positions whose residue modulo ``period`` lies in one of ``runs``.

    Runs are in order and do not overlap. A rank packs its tokens in order, so the number of
    members below a position is also its local index.
    """

    period: int = 1
    runs: tuple[Span, ...] = (Span(0, 1),)

    def __post_init__(self) -> None:
        edges = [edge for run in self.runs for edge in (run.first, run.end)]
        ordered = all(a <= b for a, b in itertools.pairwise(edges)) and all(map(len, self.runs))
        if not (1 <= len(self.runs) <= MAX_RUNS and ordered):
            raise InputError(f"a pattern needs 1 to {MAX_RUNS} runs in order, none of them empty")
        if not edges[-1] <= self.period <= MAX_POSITION:
            raise InputError(
                f"a pattern's runs end at {edges[-1]} and its period is {self.period}; "
                f"the period may not be shorter, nor longer than 2**62"
            )

    @classmethod
    def interleaved(cls, rank: int, size: int, interleave: int = 1) -> Pattern:
        """Return the share of one of ``size`` ranks that take turns at ``interleave`` tokens."""
        if size == 1:
            return EVERY
        return cls(size * interleave, (Span(rank * interleave, (rank + 1) * interleave),))

    @classmethod
    def of(cls, period: int, runs: Iterable[Span]) -> Pattern:
        """Return the pattern of these runs, given in order, in its shortest form.

        Patterns of the same positions that were made in this way are equal.
        """
        joined = _joined(runs)
        if joined == [Span(0, period)]:
            return EVERY
        # A run may go on in the next period.
        wraps = joined[0].first == 0 and joined[-1].end == period
        for parts in _divisors(len(joined) - wraps):
            length, rest = divmod(period, parts)
            inside = (run.intersect(Span(0, length)) for run in joined)
            some = tuple(run for run in inside if len(run))
            if not rest and joined == _joined(_repeated(some, length, parts)):
                return cls(length, some)
        raise AssertionError("a pattern repeats after its own period")

    @property
    def density(self) -> int:
        """Number of positions in each period."""
        return sum(map(len, self.runs))

    def __contains__(self, token: int) -> bool:
        residue = token % self.period
        return any(residue in run for run in self.runs)

    def below(self, token: int) -> int:
        """Return the number of members from 0 on that are below ``token``."""
        # Most patterns have every position, and each room asks many times.
        if self.period == 1:
            return token
        periods, residue = divmod(token, self.period)
        if len(self.runs) == 1:
            (run,) = self.runs
            return periods * len(run) + min(max(0, residue - run.first), len(run))
        firsts, counts = _index(self.runs)
        place = bisect_right(firsts, residue) - 1
        inside = min(residue - firsts[place], len(self.runs[place])) if place >= 0 else 0
        return periods * counts[-1] + (counts[place] if place >= 0 else 0) + inside

    def count(self, first: int, end: int) -> int:
        """Return the number of members in ``[first, end)``."""
        return end - first if self.period == 1 else self.below(end) - self.below(first)

    def member(self, index: int) -> int:
        """Return the member that has ``index`` others from 0 on below it."""
        if self.period == 1:
            return index
        _, counts = _index(self.runs)
        periods, rest = divmod(index, counts[-1])
        place = bisect_right(counts, rest) - 1
        return periods * self.period + self.runs[place].first + rest - counts[place]

    def most_in(self, num_tokens: int) -> int:
        """Return a bound on the members among ``num_tokens`` consecutive positions."""
        if self.period == 1:
            return num_tokens
        periods, rest = divmod(num_tokens, self.period)
        return periods * self.density + min(rest, self.density)

    def intersect(self, other: Pattern) -> Pattern | None:
        """Return the common positions, or None if there are none."""
        if EVERY in (self, other):
            return self if other == EVERY else other
        return _intersection(self, other)

    def shifted(self, by: int) -> Pattern:
        """Return the pattern of the members minus ``by``."""
        return self if self.period == 1 else _shifted(self, by % self.period)

    def repeated(self, period: int) -> Pattern:
        """Return the same positions with a longer period, a multiple of this one."""
        if period == self.period:
            return self
        if self == EVERY:
            return Pattern(period, (Span(0, period),))
        return Pattern(period, tuple(_repeated(self.runs, self.period, period // self.period)))

    def __repr__(self) -> str:
        return f"{self.density} of {self.period}"


EVERY = Pattern()


# Cached, because every rank of a layout and every pair of ranks asks for the same ones.
@lru_cache(maxsize=1024)
def _intersection(one: Pattern, other: Pattern) -> Pattern | None:
    """Return the common positions of two patterns, or None if there are none."""
    period = lcm(one.period, other.period)
    mine, theirs = one.repeated(period).runs, list(other.repeated(period).runs)
    common = []
    for run in mine:
        while theirs and theirs[0].end <= run.first:
            del theirs[0]
        for their in theirs:
            if their.first >= run.end:
                break
            common.append(run.intersect(their))
    return Pattern.of(period, common) if common else None


def _divisors(number: int) -> Iterable[int]:
    """Return the divisors of a number, the largest first."""
    return (part for part in range(number, 0, -1) if number % part == 0)


def _joined(runs: Iterable[Span]) -> list[Span]:
    """Return runs in order with those joined that touch."""
    joined: list[Span] = []
    for run in runs:
        if joined and joined[-1].end == run.first:
            joined[-1] = Span(joined[-1].first, run.end)
        else:
            joined.append(run)
    return joined


def _repeated(runs: tuple[Span, ...], period: int, times: int) -> Iterable[Span]:
    """Return the runs of several periods."""
    return (
        Span(at + run.first, at + run.end)
        for at in range(0, period * times, period)
        for run in runs
    )


@lru_cache(maxsize=1024)
def _index(runs: tuple[Span, ...]) -> tuple[list[int], list[int]]:
    """Return where each run begins, and the number of members before each run and in all."""
    counts = [0, *itertools.accumulate(map(len, runs))]
    return [run.first for run in runs], counts


@lru_cache(maxsize=1024)
def _shifted(pattern: Pattern, by: int) -> Pattern:
    period = pattern.period
    parts = []
    for run in pattern.runs:
        first, end = run.first - by, run.end - by
        if end <= 0:
            parts.append(Span(first + period, end + period))
        elif first < 0:
            parts += [Span(0, end), Span(first + period, period)]
        else:
            parts.append(Span(first, end))
    return Pattern(period, tuple(sorted(parts)))


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """The positions of a pattern from ``first`` on and below ``end``, or without end if None."""

    first: int = 0
    end: int | None = None
    pattern: Pattern = EVERY

    def __post_init__(self) -> None:
        end = self.first if self.end is None else self.end
        if not 0 <= self.first <= end <= MAX_POSITION:
            raise InputError(
                f"tokens need 0 <= first <= end <= 2**62, not first {self.first}, end {self.end}"
            )

    @classmethod
    def interleaved(cls, rank: int, size: int, interleave: int = 1) -> Tokens:
        """Return the share of one of ``size`` ranks that take turns at ``interleave`` tokens."""
        pattern = Pattern.interleaved(rank, size, interleave)
        return cls(pattern.member(0), None, pattern)

    def __contains__(self, token: int) -> bool:
        below_end = self.end is None or token < self.end
        return token >= self.first and below_end and token in self.pattern

    @property
    def is_bounded(self) -> bool:
        """Whether the set lacks some of its pattern's positions."""
        return self.end is not None or self.pattern.below(self.first) > 0

    def intersect(self, pattern: Pattern) -> Tokens | None:
        """Return the positions that are also in ``pattern``, or None if there are none."""
        common = self.pattern.intersect(pattern)
        if common is None:
            return None
        first = common.member(common.below(self.first))
        return Tokens(first, self.end, common) if self.end is None or first < self.end else None

    def clip(self, span: Span) -> Tokens:
        """Return the positions inside ``span``.

        The result is finite. It begins with its first position and ends with its last one, so
        equal sets compare equal.
        """
        pattern, first = self.pattern, max(self.first, span.first)
        end = span.end if self.end is None else min(self.end, span.end)
        if pattern.period == 1:
            return Tokens(first, max(first, end), pattern)
        first = pattern.member(pattern.below(first))
        if first >= end:
            return Tokens(first, first, pattern)
        return Tokens(first, pattern.member(pattern.below(end) - 1) + 1, pattern)

    @property
    def num_tokens(self) -> int:
        """Number of positions of a finite set."""
        if self.end is None:
            raise InputError("an unbounded token set has no count; clip it to a request first")
        return self.pattern.count(self.first, self.end)

    @property
    def last(self) -> int:
        """The last position of a finite, non-empty set."""
        assert self.end is not None
        return self.pattern.member(self.pattern.below(self.end) - 1)

    def counted(self) -> Tokens:
        """Return the positions of a finite set, counted from the first."""
        assert self.end is not None
        return Tokens(0, self.end - self.first, self.pattern.shifted(self.first))

    def local_index(self, token: int) -> int:
        """Return the index of ``token`` in this set, which is its local token on a rank."""
        return self.pattern.count(self.first, token)

    def __repr__(self) -> str:
        span = f"{self.first}:{'' if self.end is None else self.end}"
        if self.pattern == EVERY:
            return span
        step = self.pattern.density == 1
        return f"{span}:{self.pattern.period}" if step else f"{span}, {self.pattern}"


ALL_TOKENS = Tokens()
