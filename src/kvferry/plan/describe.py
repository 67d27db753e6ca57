"""A plan in words: table cells and plain text, for the command line and for pictures."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Parallel
from kvferry.layout.spec import CacheSpec, Group, Paged, StateRow, Tensor, Window
from kvferry.layout.tokens import Tokens
from kvferry.plan.plan import Move, Plan

MOVE_COLUMNS = ("from", "to", "group", "layers", "units")


def rank_coordinates(layout: Layout, rank: int) -> list[str]:
    """Return a rank's coordinates on the axes in use, as ``["pp1", "tp0"]``.

    The list is empty if ownership is stated rank by rank.
    """
    sharding = layout.sharding
    if not isinstance(sharding, Parallel):
        return []
    rest, tp_rank = divmod(rank, sharding.tp)
    rest, cp_rank = divmod(rest, sharding.cp)
    pp_rank, copy = divmod(rest, sharding.copies)
    axes = [
        ("pp", pp_rank, sharding.pp),
        ("copy", copy, sharding.copies),
        ("cp", cp_rank, sharding.cp),
        ("dcp", tp_rank % sharding.dcp, sharding.dcp),
    ]
    return [*(f"{axis}{at}" for axis, at, size in axes if size > 1), f"tp{tp_rank}"]


def rank_name(layout: Layout, rank: int) -> str:
    """Return a rank's number, with its coordinates if it has several: ``5 (pp1 tp1)``."""
    coordinates = rank_coordinates(layout, rank)
    return f"{rank} ({' '.join(coordinates)})" if len(coordinates) > 1 else str(rank)


def span_text(span: Span) -> str:
    """Return a span by its first and last number: ``0-63``, or ``7`` for a single number."""
    return str(span.first) if len(span) == 1 else f"{span.first}-{span.end - 1}"


def kind_text(group: Group) -> str:
    """Return what a group keeps, in a few words."""
    match group.kind:
        case Paged():
            kept = "paged"
        case Window(num_tokens=num_tokens):
            kept = f"window of {num_tokens:,} tokens"
        case StateRow():
            kept = "one row per request"
    ratio = group.tokens_per_entry
    return kept if ratio == 1 else f"{kept}, an entry for {ratio} tokens"


def spec_lines(spec: CacheSpec) -> list[str]:
    """Return one line for each group: its layers, units, sizes and tensors."""
    return [
        f"{group.name}: {len(group.layers)} of {spec.num_layers} layers × {group.units} units × "
        f"{group.unit_bytes} B ({kind_text(group)}; "
        + ", ".join(map(tensor_text, group.tensors))
        + ")"
        for group in spec.groups
    ]


def tensor_text(tensor: Tensor) -> str:
    """Return what an entry of a tensor consists of: ``k 128 × bfloat16``."""
    parts = tensor.parts or (tensor,)
    return f"{tensor.name} " + " + ".join(f"{p.elements} × {p.dtype}" for p in parts)


def layers_text(group: Group, span: Span) -> str:
    """Return a span of layers, with a count if the group skips some: ``3-47 (12)``."""
    count = len(group.layers_in(span))
    return span_text(span) + (f" ({count})" if count != len(span) else "")


def tokens_text(tokens: Tokens) -> str:
    """Return a finite token set in words: ``0-99``, ``1-99 by 2``, or ``64-255, 64 of 128``.

    The last form says how many positions are members of how many.
    """
    assert tokens.end is not None
    span, pattern = Span(tokens.first, tokens.end), tokens.pattern
    if tokens.num_tokens == len(span):
        return span_text(span)
    if pattern.density == 1:
        return f"{span_text(span)} by {pattern.period}"
    return f"{span_text(span)}, {pattern}"


def move_cells(plan: Plan, move: Move) -> list[str]:
    """Return one move as table cells, in the order of ``MOVE_COLUMNS``."""
    return [
        rank_name(plan.source, move.source),
        rank_name(plan.target, move.target),
        move.group,
        layers_text(plan.spec.group(move.group), move.layers),
        span_text(move.units),
    ]


def as_text(plan: Plan) -> str:
    """Return the whole plan as plain text, one line for each move."""
    heading = f"{plan.source} → {plan.target}, plan {plan.digest[:12]}"
    rows = [[*move_cells(plan, move), repr(move.tokens)] for move in plan.moves]
    return "\n".join([heading, *_aligned([[*MOVE_COLUMNS, "tokens"], *rows])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
