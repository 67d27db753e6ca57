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

# What fits on a screen. Everything is in --all, --json and --html.
MAX_ROWS = 40


def as_document(
    plan: Plan, request: Request, costs: Estimate, advice: LayersPerPush | None = None
) -> dict[str, Any]:
    """The JSON document of a plan that fits."""
    layers = {} if advice is None else {"layers_per_push": advice._asdict()}
    return layers | {
        "compatible": True,
        "reasons": [],
        "digest": plan.digest,
        "prefill": str(plan.source),
        "decode": str(plan.target),
        "tokens": request.num_tokens,
        "prefix": request.prefix,
        "bytes": plan.payload_bytes(request),
        "moves": _moves(plan, request, costs),
        "modes": {mode: _path(plan, request, costs, mode) for mode in TransferMode},
        "chosen": costs.chosen,
        "predicted_s": costs.predicted_s(),
    }


def _moves(plan: Plan, request: Request, costs: Estimate) -> list[dict[str, Any]]:
    rows = []
    for one in costs.moves:
        move, tokens = one.move, plan.tokens_of(one.move, request)
        row: dict[str, Any] = msgspec.to_builtins(move)
        row["tokens"] = [tokens.first, tokens.end, tokens.step]
        num_bytes = plan.bytes_of(move, request)
        row |= {"bytes": num_bytes, "pieces": one.shape.slices, "mode": one.choice.mode}
        rows.append(row)
    return rows


def _path(plan: Plan, request: Request, costs: Estimate, mode: TransferMode) -> dict[str, Any]:
    is_open = costs.is_open(mode)
    return {
        "pieces": costs.pieces(mode),
        "bytes": plan.payload_bytes(request),
        "chosen_bytes": costs.carried(mode),
        "open": is_open,
        "predicted_s": costs.predicted_s(mode) if is_open else None,
    }


def print_plan(plan: Plan, request: Request, costs: Estimate, *, link: str, show_all: bool) -> None:
    """Who sends what to whom, and what each mode would cost."""
    console = new_console()
    console.print(f"[bold]{plan.source}  →  {plan.target}[/]")
    for line in spec_lines(plan.spec):
        console.print(f"  {line}", style="dim", soft_wrap=True)
    cached = f", {request.prefix} cached at decode" if request.prefix else ""
    total = human_bytes(costs.num_bytes)
    console.print(f"  {request.num_tokens} tokens{cached}: [bold]{total}[/] to move")
    if not costs.moves:
        console.print("Nothing travels but the closing message.")
        return
    console.print()
    console.print(_move_table(plan, request, costs, show_all))
    hidden = 0 if show_all else max(0, len(costs.moves) - MAX_ROWS)
    if hidden:
        console.print(f"… and {hidden} more moves (--all shows them)")
    console.print()
    console.print(_path_table(costs))
    console.print()
    console.print(
        f"predicted {human_seconds(costs.predicted_s())} with the constants of {link}; "
        f"plan {plan.digest[:12]}, proven: every unit arrives exactly once",
        soft_wrap=True,
    )


def print_advice(advice: LayersPerPush | None) -> None:
    """Whether to push layer by layer, and why, where the time of a layer was given."""
    if advice is not None:
        text = f"layers per push: [bold]{advice.layers}[/], because {advice.reason}"
        new_console().print(text, soft_wrap=True)


def _move_table(plan: Plan, request: Request, costs: Estimate, show_all: bool) -> Table:
    table = _table()
    for column in (*MOVE_COLUMNS, "tokens"):
        table.add_column(column)
    for column in ("bytes", "pieces", "mode", "predicted"):
        table.add_column(column, justify="left" if column == "mode" else "right")
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


def _path_table(costs: Estimate) -> Table:
    table = _table()
    table.add_column("mode")
    for column in ("pieces", "predicted", "carries"):
        table.add_column(column, justify="right")
    for mode in TransferMode:
        is_open, carried = costs.is_open(mode), costs.carried(mode)
        table.add_row(
            mode,
            f"{costs.pieces(mode):,}" if is_open else "-",
            human_seconds(costs.predicted_s(mode)) if is_open else "not open to all",
            human_bytes(carried) if carried else "",
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
