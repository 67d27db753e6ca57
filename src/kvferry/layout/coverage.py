"""Coverage: a growing set of (layer, token) pairs, kept as strips.

A strip is a span of layers with the same tokens. Whole chunks, the usual case, need one strip. A
chunk that arrives layer by layer needs one more until it is complete, because adjacent strips with
equal tokens are joined.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.layout.intervals import Span, SpanSet


@dataclass(slots=True, eq=False)
class Strip:
    """A span of layers with the same tokens."""

    layers: Span
    tokens: SpanSet


class Coverage:
    """A growing set of (layer, token) pairs."""

    __slots__ = ("strips",)

    def __init__(self) -> None:
        # Disjoint, in the order of their layers. Strips that touch have different tokens.
        self.strips: list[Strip] = []

    def add(self, layers: Span, tokens: Span) -> None:
        """Add the tokens in these layers. Pairs that are present already may be added again."""
        if not len(layers) or not len(tokens):
            return
        if not self.strips:
            self.strips = _new(layers, tokens)
            return
        if len(self.strips) == 1 and self.strips[0].layers == layers:
            # The usual case: whole chunks. A strip that is alone shares its set with no other.
            self.strips[0].tokens.add(tokens)
            return
        strips: list[Strip] = []
        at = layers.first  # The layers below are done.
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
        """Return the pairs of these layers and tokens that are missing, in the order of layers."""
        if self.covers(layers, tokens):
            # The usual case, once everything was added.
            return []
        missing = []
        at = layers.first
        for strip in self.strips:
            inside = strip.layers.intersect(layers)
            if not len(inside):
                continue
            missing += _new(Span(at, inside.first), tokens)
            missing += [Strip(inside, SpanSet(strip.tokens.gaps(tokens)))]
            at = inside.end
        missing += _new(Span(at, layers.end), tokens)
        return [strip for strip in missing if strip.tokens.spans]

    def overlaps(self, layers: Span, tokens: Span) -> bool:
        """Return whether any pair of these layers and tokens is present."""
        return any(
            strip.tokens.overlaps(tokens)
            for strip in self.strips
            if len(strip.layers.intersect(layers))
        )

    def covers(self, layers: Span, tokens: Span) -> bool:
        """Return whether every pair of these layers and tokens is present."""
        if not len(tokens):
            return True
        at = layers.first  # The layers below are covered.
        for strip in self.strips:
            if strip.layers.end <= at:
                continue
            if at >= layers.end or at < strip.layers.first or not strip.tokens.covers(tokens):
                break
            at = strip.layers.end
        return at >= layers.end

    @property
    def end(self) -> int:
        """One past the last token of any layer, or 0."""
        return max((strip.tokens.spans[-1].end for strip in self.strips), default=0)

    def __repr__(self) -> str:
        if len(self.strips) < 2:
            return repr(self.strips[0].tokens) if self.strips else "nothing"
        return ", ".join(f"layers {strip.layers}: {strip.tokens!r}" for strip in self.strips)


def _new(layers: Span, tokens: Span) -> list[Strip]:
    """Return a strip of layers that had no tokens, or nothing if a span is empty."""
    return [Strip(layers, SpanSet([tokens]))] if len(layers) and len(tokens) else []


def _cut(strip: Strip, inside: Span, tokens: Span) -> list[Strip]:
    """Return a strip cut so that the layers ``inside`` also have these tokens."""
    more = strip.tokens.copy()
    more.add(tokens)
    below = Span(strip.layers.first, inside.first)
    above = Span(inside.end, strip.layers.end)
    pieces = [Strip(below, strip.tokens), Strip(inside, more), Strip(above, strip.tokens)]
    return [piece for piece in pieces if len(piece.layers)]


def _joined(strips: list[Strip]) -> list[Strip]:
    """Return the strips with adjacent ones of equal tokens joined."""
    joined = strips[:1]
    for strip in strips[1:]:
        last = joined[-1]
        if last.layers.end == strip.layers.first and last.tokens.spans == strip.tokens.spans:
            joined[-1] = Strip(Span(last.layers.first, strip.layers.end), last.tokens)
        else:
            joined.append(strip)
    return joined
