"""Sets of coordinates: half-open spans, and token sets with a stride."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec

from kvferry.errors import InputError

# Positions are 64-bit integers, with room for one more stride.
MAX_POSITION = 1 << 62


class Span(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The integers ``first <= x < end``."""

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end:
            raise InputError(f"a span needs 0 <= first <= end, not [{self.first}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.first

    def __contains__(self, value: int) -> bool:
        return self.first <= value < self.end

    def covers(self, other: Span) -> bool:
        """Return whether every integer of ``other`` is in this span."""
        return self.first <= other.first and other.end <= self.end

    def intersect(self, other: Span) -> Span:
        """Return the common part, which may be an empty span."""
        first = max(self.first, other.first)
        return Span(first, max(first, min(self.end, other.end)))

    def __repr__(self) -> str:
        return f"[{self.first}, {self.end})"


def cut(spans: Collection[Span]) -> list[Span]:
    """Return the same integers as disjoint spans, cut wherever one of ``spans`` begins or ends."""
    edges = sorted({edge for span in spans for edge in (span.first, span.end)})
    pieces = itertools.starmap(Span, itertools.pairwise(edges))
    return [piece for piece in pieces if any(span.covers(piece) for span in spans)]


class SpanSet:
    """A growing set of integers, kept as disjoint spans in order."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def copy(self) -> SpanSet:
        """Return another set with the same integers."""
        other = SpanSet()
        other.spans = list(self.spans)
        return other

    def add(self, span: Span) -> None:
        """Add the integers of a span. Those that are present already may be added again."""
        if not len(span):
            return
        if not self.spans or self.spans[-1].end < span.first:
            self.spans.append(span)
            return
        before = [other for other in self.spans if other.end < span.first]
        after = [other for other in self.spans if other.first > span.end]
        touching = self.spans[len(before) : len(self.spans) - len(after)]
        first = min([span.first, *(other.first for other in touching)])
        end = max([span.end, *(other.end for other in touching)])
        self.spans = [*before, Span(first, end), *after]

    def gaps(self, span: Span) -> list[Span]:
        """Return the parts of ``span`` that are not in the set, in order."""
        edges = [span.first]
        for mine in (mine.intersect(span) for mine in self.spans):
            edges += [mine.first, mine.end] if len(mine) else []
        edges.append(span.end)
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [Span(first, end) for first, end in pairs if first < end]

    def overlaps(self, span: Span) -> bool:
        """Return whether any integer of ``span`` is in the set."""
        return any(len(mine.intersect(span)) for mine in self.spans)

    def covers(self, span: Span) -> bool:
        """Return whether every integer of ``span`` is in the set."""
        return not len(span) or any(mine.covers(span) for mine in self.spans)

    def __repr__(self) -> str:
        return " ".join(map(repr, self.spans)) or "nothing"


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """The positions ``first, first + step, ...`` below ``end``, or without end if it is None.

    Interleaved context parallelism gives ``Tokens(cp_rank, None, cp)``. A contiguous share is a
    finite span with step 1.
    """

    first: int = 0
    end: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        end = self.first if self.end is None else self.end
        if not (0 <= self.first <= end <= MAX_POSITION and 1 <= self.step <= MAX_POSITION):
            raise InputError(
                f"tokens need 0 <= first <= end <= 2**62 and step >= 1, "
                f"not first {self.first}, end {self.end}, step {self.step}"
            )

    def __contains__(self, token: int) -> bool:
        below_end = self.end is None or token < self.end
        return token >= self.first and below_end and (token - self.first) % self.step == 0

    def clip(self, span: Span) -> Tokens:
        """Return the positions inside ``span``.

        The result is finite, and its ``end`` is one past its last position, so equal sets compare
        equal.
        """
        end = span.end if self.end is None else min(self.end, span.end)
        behind = max(0, span.first - self.first)
        first = self.first + -(-behind // self.step) * self.step
        if first >= end:
            return Tokens(first, first, self.step)
        last = first + (end - 1 - first) // self.step * self.step
        return Tokens(first, last + 1, self.step)

    @property
    def num_tokens(self) -> int:
        """Number of positions of a finite set."""
        if self.end is None:
            raise InputError("an unbounded token set has no count; clip it to a request first")
        return -(-(self.end - self.first) // self.step)

    @property
    def last(self) -> int:
        """The last position of a finite, non-empty set."""
        return self.first + (self.num_tokens - 1) * self.step

    def local_index(self, token: int) -> int:
        """Return the index of ``token`` in this set, which is its local token on a rank."""
        return (token - self.first) // self.step

    def __repr__(self) -> str:
        end = "" if self.end is None else self.end
        return f"{self.first}:{end}:{self.step}" if self.step > 1 else f"{self.first}:{end}"


ALL_TOKENS = Tokens()
