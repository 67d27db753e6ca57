"""Cutting of pushed blocks into fragments that fit a staging slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span
from kvferry.layout.spec import CacheSpec
from kvferry.plan.plan import Block, Plan, Request

# Maximum increase in the number of blocks for having them end at page boundaries.
MORE_FOR_PAGES = 4 / 3
# A cut by layers must need at most this share of the blocks of a cut by tokens.
FEWER_BY_LAYERS = 0.9


def within(
    spec: CacheSpec, blocks: Iterable[Block], layers: Span, tokens: Span | None = None
) -> list[Block]:
    """Return the parts of ``blocks`` inside ``layers``, and inside ``tokens`` if given."""
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
    """Return fragments whose data fits a slot; None if one token of one layer does not.

    Fragments span all layers where possible. Layers are cut where one token of all layers is
    too large, as with state rows, or where that needs fewer fragments. Fragments end at page
    boundaries if that needs few more of them, because binding whole pages takes half the time.
    Their sizes are about even, because a small last fragment costs as much as a full one.
    """
    layers = plan.spec.group(block.group).layers_in(block.layers)
    page_tokens = lcm(plan.source.page_tokens, plan.target.page_tokens)
    size = _SlotSize(slot_bytes, _rates(plan, source, target, block), page_tokens)
    if slot_bytes < size.of(1):
        return None
    plain = _cut(block, layers, size)
    # Try one page more than fits, with as many layers as then fit.
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
    """Cut a block by layers if one token of all of them does not fit, and by tokens."""
    num_layers = min(len(layers), size.slot_bytes // size.of(1))
    num_tokens = _even(len(block.tokens), size.most_tokens(num_layers), size.page_tokens)
    return [
        Block(block.group, Span(some[0], some[-1] + 1), Span(first, end))
        for some in (layers[i : i + num_layers] for i in range(0, len(layers), num_layers))
        for first, end in _steps(block.tokens, num_tokens)
    ]


class _Rate(NamedTuple):
    """Bytes per token and layer of a move that carries every ``step``-th token."""

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
    """Capacity of a slot for the moves between one source and one target."""

    slot_bytes: int
    rates: list[_Rate]
    page_tokens: int

    def of(self, num_tokens: int) -> int:
        """Return the maximum size of ``num_tokens`` consecutive tokens of one layer."""
        return sum(-(-num_tokens // rate.step) * rate.token_bytes for rate in self.rates)

    def most_tokens(self, num_layers: int) -> int:
        """Return how many consecutive tokens of ``num_layers`` layers always fit."""
        layer_bytes = self.slot_bytes // num_layers
        count = int(layer_bytes / sum(rate.token_bytes / rate.step for rate in self.rates))
        while count > 1 and self.of(count) > layer_bytes:
            count -= 1
        return max(1, count)


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


def _steps(span: Span, step: int) -> Iterable[tuple[int, int]]:
    return ((at, min(at + step, span.end)) for at in range(span.first, span.end, step))


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
