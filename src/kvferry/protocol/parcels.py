"""What a push means for one target: blocks, cut to what a staging slot holds."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvferry.layout.intervals import Span, SpanSet
from kvferry.plan.plan import Block, Plan


def within(blocks: Iterable[Block], span: Span) -> list[Block]:
    """The parts of the blocks that a chunk contains."""
    clipped = (replace(block, tokens=block.tokens.intersect(span)) for block in blocks)
    return [block for block in clipped if len(block.tokens)]


def cut_to_slots(
    plan: Plan, source: int, target: int, block: Block, slot_bytes: int
) -> list[Block] | None:
    """Blocks whose dense images fit a slot; None if not even one token of one layer does.

    Prefers whole tokens over all layers; cuts layers only where one token of all
    of them is too large, as a state row often is.
    """
    layers = plan.spec.group(block.group).layers_in(block.layers)
    layer_bytes = _token_bytes(plan, source, target, block)
    num_layers = min(len(layers), slot_bytes // layer_bytes)
    if not num_layers:
        return None
    num_tokens = max(1, slot_bytes // (num_layers * layer_bytes))
    return [
        Block(block.group, Span(some[0], some[-1] + 1), Span(first, end))
        for some in (layers[i : i + num_layers] for i in range(0, len(layers), num_layers))
        for first, end in _steps(block.tokens, num_tokens)
    ]


def _token_bytes(plan: Plan, source: int, target: int, block: Block) -> int:
    """At most so many bytes for one token of one layer."""
    unit_bytes = plan.spec.group(block.group).unit_bytes
    moves = plan.between(source, target)
    units = sum(
        len(move.units)
        for move in moves
        if move.group == block.group and len(move.layers.intersect(block.layers))
    )
    return units * unit_bytes


def _steps(span: Span, step: int) -> Iterable[tuple[int, int]]:
    return ((at, min(at + step, span.end)) for at in range(span.first, span.end, step))


def merge(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The same coverage in as few blocks as token spans allow."""
    spans: dict[tuple[str, Span], SpanSet] = {}
    for block in blocks:
        spans.setdefault((block.group, block.layers), SpanSet()).add(block.tokens)
    return tuple(
        Block(group, layers, span)
        for (group, layers), covered in spans.items()
        for span in covered.spans
    )
