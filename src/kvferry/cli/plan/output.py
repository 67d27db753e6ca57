"""The output of ``kvferry plan``: a table for people, a document for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table

from kvferry.cli.printing import console as new_console
from kvferry.plan import Estimate, Plan, Request, TransferMode
from kvferry.plan.describe import MOVE_COLUMNS, move_cells, spec_lines, tokens_text
from kvferry.plan.layers import LayersPerPush
from kvferry.plan.units import human_bytes, human_seconds

# Rows that fit on a screen. --all and --json show all moves.
MAX_ROWS = 40


def as_document(
    plan: Plan, request: Request, costs: Estimate, advice: LayersPerPush | None = None
) -> dict[str, Any]:
    """Return the JSON document of a plan."""
    num_bytes = plan.payload_bytes(request)
    layers = {} if advice is None else {"layers_per_push": advice._asdict()}
    return layers | {
        "compatible": True,
        "reasons": [],
        "digest": plan.digest,
        "prefill": str(plan.source),
        "decode": str(plan.target),
        "tokens": request.num_tokens,
        "prefix": request.prefix,
        "bytes": num_bytes,
        "moves": _moves(plan, request, costs),
        "modes": {mode: _mode(costs, mode, num_bytes) for mode in TransferMode},
        "chosen": costs.chosen,
        "predicted_s": costs.predicted_s(),
    }


def _moves(plan: Plan, request: Request, costs: Estimate) -> list[dict[str, Any]]:
    rows = []
    for one in costs.moves:
        tokens = plan.tokens_of(one.move, request)
        row: dict[str, Any] = msgspec.to_builtins(one.move)
        row["tokens"] = {
            "first": tokens.first,
            "end": tokens.end,
            "period": tokens.pattern.period,
            "runs": [[run.first, run.end] for run in tokens.pattern.runs],
        }
        row["bytes"] = plan.bytes_of(one.move, request)
        rows.append(row | {"pieces": one.shape.slices, "mode": one.choice.mode})
    return rows


def _mode(costs: Estimate, mode: TransferMode, num_bytes: int) -> dict[str, Any]:
    is_open = costs.is_open(mode)
    return {
        "pieces": costs.pieces(mode),
        "bytes": num_bytes,
        "chosen_bytes": costs.carried(mode),
        "open": is_open,
        "predicted_s": costs.predicted_s(mode) if is_open else None,
    }


def print_plan(
    plan: Plan, request: Request, costs: Estimate, *, cost_model: str, show_all: bool
) -> None:
    """Print who sends what to whom, and the predicted cost of each mode."""
    console = new_console()
    console.print(f"[bold]{plan.source}  →  {plan.target}[/]")
    for line in spec_lines(plan.spec):
        console.print(f"  {line}", style="dim", soft_wrap=True)
    cached = f", {request.prefix} cached at decode" if request.prefix else ""
    total = human_bytes(costs.num_bytes)
    console.print(f"  {request.num_tokens} tokens{cached}: [bold]{total}[/] to move")
    if not costs.moves:
        console.print("Nothing to move: only the Close message is sent.")
        return
    console.print()
    console.print(_move_table(plan, request, costs, show_all))
    hidden = len(costs.moves) - MAX_ROWS
    if hidden > 0 and not show_all:
        console.print(f"… and {hidden} more moves (--all shows them)")
    console.print()
    console.print(_mode_table(costs))
    console.print()
    console.print(
        f"predicted {human_seconds(costs.predicted_s())} with the costs of {cost_model}; "
        f"plan {plan.digest[:12]}, checked: every unit arrives exactly once",
        soft_wrap=True,
    )


def print_advice(advice: LayersPerPush) -> None:
    """Print how many layers to push at a time, and why."""
    text = f"layers per push: [bold]{advice.layers}[/], because {advice.reason}"
    new_console().print(text, soft_wrap=True)


def _move_table(plan: Plan, request: Request, costs: Estimate, show_all: bool) -> Table:
    table = _table((*MOVE_COLUMNS, "tokens", "bytes", "pieces", "mode", "predicted"))
    for one in costs.moves if show_all else costs.moves[:MAX_ROWS]:
        table.add_row(
            *move_cells(plan, one.move),
            tokens_text(plan.tokens_of(one.move, request)),
            human_bytes(one.shape.num_bytes),
            f"{one.shape.slices:,}",
            one.choice.mode,
            human_seconds(one.choice.predicted_s),
        )
    return table


def _mode_table(costs: Estimate) -> Table:
    table = _table(("mode", "pieces", "predicted", "carries"))
    for mode in TransferMode:
        is_open, carried = costs.is_open(mode), costs.carried(mode)
        table.add_row(
            mode,
            f"{costs.pieces(mode):,}" if is_open else "-",
            human_seconds(costs.predicted_s(mode)) if is_open else "not open to all",
            human_bytes(carried) if carried else "",
        )
    return table


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = column in ("bytes", "pieces", "predicted", "carries")
        table.add_column(column, justify="right" if numeric else "left")
    return table
