"""Cutting of pushed blocks into fragments that fit a staging slot."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span
from kvferry.layout.pages import page_period
from kvferry.layout.spec import CacheSpec
from kvferry.layout.tokens import EVERY, Pattern
from kvferry.plan.plan import MAX_TOKENS, Block, Plan, Request

# Maximum increase in the number of blocks for having them end at page boundaries.
MORE_FOR_PAGES = 4 / 3
# A cut by layers must need at most this share of the blocks of a cut by tokens.
FEWER_BY_LAYERS = 0.9


def within(
    spec: CacheSpec, blocks: Iterable[Block], layers: Span, tokens: Span | None = None
) -> list[Block]:
    """Return the parts of ``blocks`` inside ``layers``, and inside ``tokens`` if given."""
    clipped = (_inside(b, layers, b.tokens if tokens is None else tokens) for b in blocks)
    return [b for b in clipped if len(b.tokens) and spec.group(b.group).layers_in(b.layers)]


def _inside(block: Block, layers: Span, tokens: Span) -> Block:
    """Return the part of a block inside ``layers`` and ``tokens``, which may be empty."""
    if layers.covers(block.layers) and tokens.covers(block.tokens):
        return block
    inner = block.layers.intersect(layers), block.tokens.intersect(tokens)
    return Block(block.group, *inner)


def cut_to_slots(
    plan: Plan, source: int, target: int, block: Block, slot_bytes: int
) -> list[Block] | None:
    """Return fragments whose data fits a slot; None if one token of one layer does not.

    Fragments span all layers where possible. Layers are cut where one token of all layers is
    too large, as with state rows, or where that needs fewer fragments. Fragments end at page
    boundaries if that needs few more of them, because binding whole pages takes half the time.
    Their sizes are about even, because a small last fragment costs as much as a full one.
    """
    layers = plan.spec.group(block.group).layers_in(block.layers)
    size = _slot_size(plan, source, target, block, slot_bytes)
    page_tokens = size.page_tokens
    if slot_bytes < size.of(1):
        return None
    plain = _cut(block, layers, size)
    # Try one page more than fits, with as many layers as then fit.
    pages = -(-size.most_tokens(min(len(layers), slot_bytes // size.of(1))) // page_tokens)
    num_layers = slot_bytes // size.of(pages * page_tokens)
    if 0 < num_layers < len(layers):
        parts = layers[:num_layers], layers[num_layers:]
        other = [one for part in parts for one in _cut(block, part, size)]
        ends_with_pages = size.tokens.count(*_ends(plain[0].tokens)) % page_tokens == 0
        if len(other) <= (FEWER_BY_LAYERS if ends_with_pages else 1) * len(plain):
            return other
    return plain


def _cut(block: Block, layers: tuple[int, ...], size: _SlotSize) -> list[Block]:
    """Cut a block by layers if one token of all of them does not fit, and by tokens."""
    num_layers = min(len(layers), size.slot_bytes // size.of(1))
    count = size.tokens.count(*_ends(block.tokens))
    num_tokens = _even(count, size.most_tokens(num_layers), size.page_tokens) if count else 1
    return [
        Block(block.group, Span(some[0], some[-1] + 1), tokens)
        for some in (layers[i : i + num_layers] for i in range(0, len(layers), num_layers))
        for tokens in _steps(size.tokens, block.tokens, num_tokens)
    ]


def _ends(span: Span) -> tuple[int, int]:
    return span.first, span.end


class _Rate(NamedTuple):
    """Bytes per token and layer of a move, and the tokens that it carries."""

    token_bytes: int
    tokens: Pattern


def _slot_size(plan: Plan, source: int, target: int, block: Block, slot_bytes: int) -> _SlotSize:
    unit_bytes = plan.spec.group(block.group).unit_bytes
    rates = [
        _Rate(len(move.units) * unit_bytes, move.tokens.pattern)
        for move in plan.between(source, target)
        if move.group == block.group and len(move.layers.intersect(block.layers))
    ]
    sides = (plan.source, plan.held[source]), (plan.target, plan.wanted[target])
    period = lcm(
        *(page_period(side, h) for side, held in sides for h in held if h.group == block.group)
    )
    tokens = rates[0].tokens
    if any(rate.tokens != tokens for rate in rates):
        return _SlotSize(slot_bytes, rates, EVERY, period)
    # Moves of the same tokens, as nearly always: count only these.
    packed = [rate._replace(tokens=EVERY) for rate in rates]
    page_tokens = lcm(period, tokens.period) // tokens.period * tokens.density
    return _SlotSize(slot_bytes, packed, tokens, page_tokens)


class _SlotSize(NamedTuple):
    """Capacity of a slot for the moves between one source and one target, in ``tokens``.

    Pages on both sides begin at the same tokens after every ``page_tokens`` of them.
    """

    slot_bytes: int
    rates: list[_Rate]
    tokens: Pattern
    page_tokens: int

    def of(self, num_tokens: int) -> int:
        """Return the maximum size of ``num_tokens`` tokens of one layer."""
        return sum(rate.tokens.most_in(num_tokens) * rate.token_bytes for rate in self.rates)

    def most_tokens(self, num_layers: int) -> int:
        """Return how many tokens of ``num_layers`` layers always fit."""
        layer_bytes = self.slot_bytes // num_layers
        return max(1, bisect_right(range(MAX_TOKENS + 1), layer_bytes, key=self.of) - 1)


def _even(num_tokens: int, most: int, page_tokens: int) -> int:
    """Return the fragment size for ``num_tokens``, at most ``most`` tokens each."""
    pages = most // page_tokens * page_tokens
    if pages and -(-num_tokens // pages) <= MORE_FOR_PAGES * -(-num_tokens // most):
        most = pages
    even = -(-num_tokens // -(-num_tokens // most))
    whole = -(-even // page_tokens) * page_tokens
    return whole if whole <= most else even


def image_bytes(
    plan: Plan, source: int, target: int, request: Request, blocks: Iterable[Block]
) -> int:
    """Return the packed size of blocks in a staging slot."""
    total = 0
    for block in blocks:
        group = plan.spec.group(block.group)
        for move in plan.between(source, target):
            if move.group == block.group:
                layers = group.layers_in(move.layers.intersect(block.layers))
                tokens = plan.tokens_of(move, request).clip(block.tokens)
                cells = len(layers) * len(move.units) * tokens.num_tokens
                total += cells * group.unit_bytes
    return total


def _steps(tokens: Pattern, span: Span, step: int) -> Iterable[Span]:
    """Return a span cut where each part has ``step`` of the tokens, the last perhaps fewer."""
    below = range(tokens.below(span.first), tokens.below(span.end), step)
    inner = [tokens.member(index) for index in below[1:]]
    return itertools.starmap(Span, itertools.pairwise([span.first, *inner, span.end]))


def merge(spec: CacheSpec, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the same coverage in as few blocks as possible."""
    if len(blocks) < 2:
        return tuple(blocks)
    covered: dict[str, Coverage] = {}
    for block in blocks:
        # Merge by place in the group: layer numbers between two of its layers belong to others.
        places = spec.group(block.group).places_in(block.layers)
        covered.setdefault(block.group, Coverage()).add(places, block.tokens)
    return tuple(
        Block(group, spec.group(group).layers_at(strip.layers), span)
        for group, coverage in covered.items()
        for strip in coverage.strips
        for span in strip.tokens.spans
    )


def join_layers(spec: CacheSpec, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks with those of equal tokens merged over adjacent layers."""
    if len(blocks) < 2:
        return tuple(blocks)
    joined: dict[tuple[str, Span], list[Block]] = {}
    for block in blocks:
        joined.setdefault((block.group, block.tokens), []).append(block)
    return tuple(block for same in joined.values() for block in merge(spec, same))
