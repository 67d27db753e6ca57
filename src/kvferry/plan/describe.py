"""A plan in words: rows that a table can show, and plain text."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.layout.intervals import Span, Tokens
from kvferry.layout.layout import Layout, Parallel
from kvferry.layout.spec import CacheSpec, Group, Paged, StateRow, Window
from kvferry.plan.plan import Move, Plan


def rank_name(layout: Layout, rank: int) -> str:
    """A rank with its coordinates where it has any: ``5 (pp1 tp1)``."""
    sharding = layout.sharding
    if not isinstance(sharding, Parallel):
        return str(rank)
    rest, tp_rank = divmod(rank, sharding.tp)
    pp_rank, cp_rank = divmod(rest, sharding.cp)
    places = [("pp", pp_rank, sharding.pp), ("cp", cp_rank, sharding.cp)]
    named = [f"{axis}{at}" for axis, at, size in places if size > 1]
    return f"{rank} ({' '.join([*named, f'tp{tp_rank}'])})" if named else str(rank)


def span_text(first: int, end: int) -> str:
    """A half-open span as people write it: ``0-63``, or ``7`` for a single one."""
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def kind_text(group: Group) -> str:
    """What a group is, in a few words."""
    match group.kind:
        case Paged():
            return "paged"
        case Window(num_tokens=kept):
            return f"window of {kept}"
        case StateRow():
            return "one row a request"


def spec_lines(spec: CacheSpec) -> list[str]:
    """One line per group: what it is and how large."""
    return [
        f"{group.name}: {len(group.layers)} of {spec.num_layers} layers × {group.units} units × "
        f"{group.unit_bytes} B ({kind_text(group)}; "
        + ", ".join(f"{t.name} {t.elements} × {t.dtype}" for t in group.tensors)
        + ")"
        for group in spec.groups
    ]


def layers_text(group: Group, span: Span) -> str:
    """A span of layers, with their number where the group does not have all of them."""
    count = len(group.layers_in(span))
    sparse = f" ({count})" if count != len(span) else ""
    return span_text(span.first, span.end) + sparse


def tokens_text(tokens: Tokens) -> str:
    """The positions of a request, with their stride where there is one."""
    assert tokens.end is not None
    step = f" by {tokens.step}" if tokens.step > 1 else ""
    return span_text(tokens.first, tokens.end) + step


def move_cells(plan: Plan, move: Move) -> list[str]:
    """One move as table cells, in the order of ``MOVE_COLUMNS``."""
    return [
        rank_name(plan.source, move.source),
        rank_name(plan.target, move.target),
        move.group,
        layers_text(plan.spec.group(move.group), move.layers),
        span_text(move.units.first, move.units.end),
    ]


MOVE_COLUMNS = ("from", "to", "group", "layers", "units")


def as_text(plan: Plan) -> str:
    """The whole plan as plain text."""
    heading = f"{plan.source} → {plan.target}, plan {plan.digest[:12]}"
    rows = [[*move_cells(plan, move), repr(move.tokens)] for move in plan.moves]
    return "\n".join([heading, *_aligned([[*MOVE_COLUMNS, "tokens"], *rows])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
