"""A plan in words: table cells and plain text, for the command line and for pictures."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Parallel
from kvferry.layout.spec import CacheSpec, Group, Paged, StateRow, Window
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
    pp_rank, cp_rank = divmod(rest, sharding.cp)
    outer = [("pp", pp_rank, sharding.pp), ("cp", cp_rank, sharding.cp)]
    return [*(f"{axis}{at}" for axis, at, size in outer if size > 1), f"tp{tp_rank}"]


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
            return "paged"
        case Window(num_tokens=kept):
            return f"window of {kept:,} tokens"
        case StateRow():
            return "one row per request"


def spec_lines(spec: CacheSpec) -> list[str]:
    """Return one line for each group: its layers, units, sizes and tensors."""
    return [
        f"{group.name}: {len(group.layers)} of {spec.num_layers} layers × {group.units} units × "
        f"{group.unit_bytes} B ({kind_text(group)}; "
        + ", ".join(f"{t.name} {t.elements} × {t.dtype}" for t in group.tensors)
        + ")"
        for group in spec.groups
    ]


def layers_text(group: Group, span: Span) -> str:
    """Return a span of layers, with a count if the group skips some: ``3-47 (12)``."""
    count = len(group.layers_in(span))
    return span_text(span) + (f" ({count})" if count != len(span) else "")


def tokens_text(tokens: Tokens) -> str:
    """Return the positions of a finite token set: ``0-99``, or ``1-99 by 2`` with a stride."""
    assert tokens.end is not None
    step = f" by {tokens.step}" if tokens.step > 1 and tokens.num_tokens > 1 else ""
    return span_text(Span(tokens.first, tokens.end)) + step


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
