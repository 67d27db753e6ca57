"""Sets of integers: half-open spans, and growing sets of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import msgspec

from kvferry.errors import InputError


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
    """A growing set of integers, kept as disjoint spans in order, with gaps between them."""

    __slots__ = ("spans",)

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = list(spans)

    def copy(self) -> SpanSet:
        """Return another set with the same integers."""
        return SpanSet(self.spans)

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
        for mine in self.spans:
            if mine.covers(span):
                return True
        return not len(span)

    def __repr__(self) -> str:
        return " ".join(map(repr, self.spans)) or "nothing"
