"""Coverage: a growing set of (layer, token) pairs, kept as strips.

A strip is a span of layers that have the same tokens. Whole chunks, which are the rule,
cost one strip in all; a chunk that comes layer by layer costs one more while it is under
way, because strips that have become alike are joined again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.layout.intervals import Span, SpanSet


@dataclass(slots=True, eq=False)
class Strip:
    """Layers that have the same tokens."""

    layers: Span
    tokens: SpanSet


class Coverage:
    """What of a sheet of layers and tokens is there."""

    __slots__ = ("strips",)

    def __init__(self) -> None:
        # In the order of their layers, disjoint; neighbours that touch differ.
        self.strips: list[Strip] = []

    def add(self, layers: Span, tokens: Span) -> None:
        """Take in those tokens of those layers; overlaps and repetitions change nothing."""
        if not len(layers) or not len(tokens):
            return
        if not self.strips or (len(self.strips) == 1 and self.strips[0].layers == layers):
            # Whole chunks, which are the rule.
            before = self.strips[0].tokens.spans if self.strips else []
            self.strips = [Strip(layers, _set_of([*before, tokens]))]
            return
        strips: list[Strip] = []
        at = layers.first  # from here on, no strip of these layers has been met
        for strip in self.strips:
            inside = strip.layers.intersect(layers)
            if not len(inside):
                if strip.layers.first >= layers.end:
                    strips += _new(Span(at, layers.end), tokens)
                    at = layers.end
                strips.append(strip)
                continue
            strips += _new(Span(at, inside.first), tokens)
            strips += _cut(strip, inside, tokens)
            at = inside.end
        strips += _new(Span(at, max(at, layers.end)), tokens)
        self.strips = _joined(strips)

    def gaps(self, layers: Span, tokens: Span) -> list[Strip]:
        """What of those tokens of those layers is not there, in the order of the layers."""
        lacking = []
        at = layers.first
        for strip in self.strips:
            inside = strip.layers.intersect(layers)
            if not len(inside):
                continue
            lacking += _new(Span(at, inside.first), tokens)
            lacking += [Strip(inside, _set_of(strip.tokens.gaps(tokens)))]
            at = inside.end
        lacking += _new(Span(at, layers.end), tokens)
        return [strip for strip in lacking if strip.tokens.spans]

    def overlaps(self, layers: Span, tokens: Span) -> bool:
        """Whether one of those tokens of one of those layers is there."""
        return any(
            strip.tokens.overlaps(tokens)
            for strip in self.strips
            if len(strip.layers.intersect(layers))
        )

    def covers(self, layers: Span, tokens: Span) -> bool:
        """Whether all of those tokens of all of those layers are there."""
        if not len(tokens):
            return True
        at = layers.first
        for strip in self.strips:
            inside = strip.layers.intersect(layers)
            if not len(inside):
                continue
            if at < inside.first or not strip.tokens.covers(tokens):
                return False
            at = inside.end
        return at >= layers.end

    @property
    def end(self) -> int:
        """One past the last token of any layer; 0 where there is none."""
        return max((strip.tokens.spans[-1].end for strip in self.strips), default=0)

    def __repr__(self) -> str:
        if len(self.strips) < 2:
            return repr(self.strips[0].tokens) if self.strips else "nothing"
        return ", ".join(f"layers {strip.layers}: {strip.tokens!r}" for strip in self.strips)


def _set_of(spans: Iterable[Span]) -> SpanSet:
    made = SpanSet()
    for span in spans:
        made.add(span)
    return made


def _new(layers: Span, tokens: Span) -> list[Strip]:
    """A strip of layers that had nothing; none where there are no such layers."""
    return [Strip(layers, _set_of([tokens]))] if len(layers) and len(tokens) else []


def _cut(strip: Strip, inside: Span, tokens: Span) -> list[Strip]:
    """A strip of which some layers get those tokens."""
    more = strip.tokens.copy()
    more.add(tokens)
    below = Span(strip.layers.first, inside.first)
    above = Span(inside.end, strip.layers.end)
    pieces = [Strip(below, strip.tokens), Strip(inside, more), Strip(above, strip.tokens)]
    return [piece for piece in pieces if len(piece.layers)]


def _joined(strips: list[Strip]) -> list[Strip]:
    """The same with neighbours that are alike made one."""
    joined = strips[:1]
    for strip in strips[1:]:
        last = joined[-1]
        if last.layers.end == strip.layers.first and last.tokens.spans == strip.tokens.spans:
            joined[-1] = Strip(Span(last.layers.first, strip.layers.end), last.tokens)
        else:
            joined.append(strip)
    return joined
