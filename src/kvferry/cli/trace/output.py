"""A waterfall in a terminal, and a table of the slowest rooms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from kvferry.cli.printing import console
from kvferry.dashboard.drawing import STAGE_NAMES, details, facts_of, merged
from kvferry.plan.units import human_seconds
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

BAR_CELLS = 40


def print_waterfall(waterfall: Waterfall) -> None:
    """Print facts and steps, with time running to the right."""
    out = console()
    out.print(f"[bold]room {escape(waterfall.room)}[/]")
    for name, value in facts_of(waterfall):
        out.print(f"  [dim]{name:<13}[/] {escape(value)}", soft_wrap=True)
    table = Table("after", "endpoint", "step", "peer", box=None, padding=(0, 1, 0, 0))
    table.add_column(width=BAR_CELLS, no_wrap=True)
    table.add_column(no_wrap=True)
    for bar, times in merged(waterfall.bars):
        table.add_row(
            human_seconds(bar.begun_s),
            escape(bar.endpoint),
            bar.step,
            escape(bar.peer),
            _timeline(bar, waterfall.span_s or 1e-9),
            escape(details(bar, times)),
        )
    out.print(table)


def _timeline(bar: WaterfallBar, span_s: float) -> str:
    begin = min(BAR_CELLS - 1, int(BAR_CELLS * bar.begun_s / span_s))
    end = min(BAR_CELLS, max(begin + 1, round(BAR_CELLS * bar.ended_s / span_s)))
    return " " * begin + ("█" * (end - begin) if bar.step in SPANS else "·")


def print_slow(waterfalls: Sequence[Waterfall]) -> None:
    """Print one line per room: how long it took, and the time of each stage."""
    out = console()
    if not waterfalls:
        out.print("no room has ended in the last 5 minutes")
        return
    stages = [STAGE_NAMES[stage] for stage in RoomStage]
    table = Table("room", "took", *stages, "outcome", "request", box=None)
    table.columns[0].no_wrap = True
    for one in waterfalls:
        times = [human_seconds(one.stages[stage]) for stage in RoomStage]
        row = (one.room, human_seconds(one.seconds), *times, one.outcome, escape(one.request))
        table.add_row(*row)
    out.print(table)
