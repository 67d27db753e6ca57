"""What a push means for one target: blocks, cut to what a staging slot holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span
from kvferry.layout.spec import CacheSpec
from kvferry.plan.plan import Block, Plan, Request

# How many times as many blocks it may take that they end where pages do.
MORE_FOR_PAGES = 4 / 3
# How many times as many it must be for layers to be cut apart: those have blocks of their own.
FEWER_BY_LAYERS = 0.9


def within(
    spec: CacheSpec, blocks: Iterable[Block], layers: Span, tokens: Span | None = None
) -> list[Block]:
    """The parts of the blocks that lie in those layers, and in those tokens if some are given."""
    clipped = (
        replace(
            block,
            layers=block.layers.intersect(layers),
            tokens=block.tokens if tokens is None else block.tokens.intersect(tokens),
        )
        for block in blocks
    )
    return [b for b in clipped if len(b.tokens) and spec.group(b.group).layers_in(b.layers)]


def cut_to_slots(
    plan: Plan, source: int, target: int, block: Block, slot_bytes: int
) -> list[Block] | None:
    """Blocks whose dense images fit a slot; None if not even one token of one layer does.

    Prefers whole tokens over all layers; cuts layers where one token of all of them is too
    large, as a state row often is, or where it takes fewer blocks. The blocks end where pages
    do if that takes few more of them, because whole pages are bound in half the time, and are
    about even: a small one at the end would cost as much as the others.
    """
    layers = plan.spec.group(block.group).layers_in(block.layers)
    page_tokens = lcm(plan.source.page_tokens, plan.target.page_tokens)
    size = _SlotSize(slot_bytes, _rates(plan, source, target, block), page_tokens)
    if slot_bytes < size.of(1):
        return None
    plain = _cut(block, layers, size)
    # One page more than fits, and as many layers as then do.
    pages = -(-size.most_tokens(min(len(layers), slot_bytes // size.of(1))) // page_tokens)
    num_layers = slot_bytes // size.of(pages * page_tokens)
    if 0 < num_layers < len(layers):
        parts = layers[:num_layers], layers[num_layers:]
        other = [one for part in parts for one in _cut(block, part, size)]
        ends_with_pages = len(plain[0].tokens) % page_tokens == 0
        if len(other) <= (FEWER_BY_LAYERS if ends_with_pages else 1) * len(plain):
            return other
    return plain


def _cut(block: Block, layers: tuple[int, ...], size: _SlotSize) -> list[Block]:
    """Blocks of as many of these layers as one token of them fits, and of as many tokens."""
    num_layers = min(len(layers), size.slot_bytes // size.of(1))
    num_tokens = _even(len(block.tokens), size.most_tokens(num_layers), size.page_tokens)
    return [
        Block(block.group, Span(some[0], some[-1] + 1), Span(first, end))
        for some in (layers[i : i + num_layers] for i in range(0, len(layers), num_layers))
        for first, end in _steps(block.tokens, num_tokens)
    ]


class _Rate(NamedTuple):
    """One move's bytes for each token that it carries of one layer: every ``step``-th."""

    token_bytes: int
    step: int


def _rates(plan: Plan, source: int, target: int, block: Block) -> list[_Rate]:
    unit_bytes = plan.spec.group(block.group).unit_bytes
    return [
        _Rate(len(move.units) * unit_bytes, move.tokens.step)
        for move in plan.between(source, target)
        if move.group == block.group and len(move.layers.intersect(block.layers))
    ]


class _SlotSize(NamedTuple):
    """What a slot holds of a pair's moves."""

    slot_bytes: int
    rates: list[_Rate]
    page_tokens: int

    def of(self, num_tokens: int) -> int:
        """The most bytes that a stretch of so many tokens of one layer can have."""
        return sum(-(-num_tokens // rate.step) * rate.token_bytes for rate in self.rates)

    def most_tokens(self, num_layers: int) -> int:
        """The longest stretch of tokens that always fits with so many layers."""
        room_bytes = self.slot_bytes // num_layers
        count = int(room_bytes / sum(rate.token_bytes / rate.step for rate in self.rates))
        while count > 1 and self.of(count) > room_bytes:
            count -= 1
        return max(1, count)


def _even(num_tokens: int, most: int, page_tokens: int) -> int:
    """How many tokens each of a few stretches has, if none may have more than ``most``."""
    pages = most // page_tokens * page_tokens
    if pages and -(-num_tokens // pages) <= MORE_FOR_PAGES * -(-num_tokens // most):
        most = pages
    even = -(-num_tokens // -(-num_tokens // most))
    whole = -(-even // page_tokens) * page_tokens
    return whole if whole <= most else even


def image_bytes(
    plan: Plan, source: int, target: int, request: Request, blocks: Iterable[Block]
) -> int:
    """The size of the dense image of those blocks."""
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


def _steps(span: Span, step: int) -> Iterable[tuple[int, int]]:
    return ((at, min(at + step, span.end)) for at in range(span.first, span.end, step))


def merge(spec: CacheSpec, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The same coverage in few blocks, whatever order and cut it came in."""
    if len(blocks) < 2:
        return tuple(blocks)
    covered: dict[str, Coverage] = {}
    for block in blocks:
        # By places, because a strip of numbers between two layers would be a block of nothing.
        places = spec.group(block.group).places_in(block.layers)
        covered.setdefault(block.group, Coverage()).add(places, block.tokens)
    return tuple(
        Block(group, spec.group(group).layers_at(strip.layers), span)
        for group, coverage in covered.items()
        for strip in coverage.strips
        for span in strip.tokens.spans
    )


def join_layers(spec: CacheSpec, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The same blocks, with those of one chunk whose layers follow each other made one."""
    if len(blocks) < 2:
        return tuple(blocks)
    joined: dict[tuple[str, Span], list[Block]] = {}
    for block in blocks:
        joined.setdefault((block.group, block.tokens), []).append(block)
    return tuple(block for alike in joined.values() for block in merge(spec, alike))
