"""A waterfall in a terminal, and a table of the slowest rooms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec.structs import replace
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.cli.printing import console
from kvferry.dashboard.drawing import STAGE_NAMES, facts_of
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.steps import StepKind
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

BAR_CELLS, STRIP_CELLS = 40, 72
COLOURS = {
    RoomStage.PREFILL: "bright_black",
    RoomStage.PAGES: "yellow",
    RoomStage.WIRE: "blue",
    RoomStage.GATHER: "magenta",
    RoomStage.SCATTER: "green",
    RoomStage.CONTROL: "white",
}
ENDS = {StepKind.DONE: "green", StepKind.FAILED: "red"}


def print_waterfall(waterfall: Waterfall) -> None:
    """Print facts, stages and steps, with time running to the right."""
    out = console()
    out.print(f"[bold]room {escape(waterfall.room)}[/]")
    for name, value in facts_of(waterfall):
        out.print(f"  [dim]{name:<13}[/] {escape(value)}", soft_wrap=True)
    _print_stages(waterfall)
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("after", justify="right")
    for name in ("endpoint", "step", "peer"):
        table.add_column(name, no_wrap=True)
    table.add_column("", width=BAR_CELLS, no_wrap=True)
    table.add_column("", no_wrap=True)
    span_s = max((bar.ended_s for bar in waterfall.bars), default=0.0) or 1e-9
    for bar, times in merged(waterfall.bars):
        table.add_row(
            human_seconds(bar.begun_s),
            escape(bar.endpoint),
            Text(str(bar.step), style=ENDS.get(bar.step, "")),
            escape(bar.peer),
            _bar(bar, span_s),
            escape(_details(bar, times)),
        )
    out.print(table)


def merged(bars: Sequence[WaterfallBar]) -> list[tuple[WaterfallBar, int]]:
    """Merge neighbouring bars of one kind; return each with the number of bars in it."""
    lines = []
    for _, group in groupby(bars, key=lambda bar: (bar.endpoint, bar.step, bar.peer, bar.mode)):
        alike = list(group)
        whole = replace(
            alike[0],
            begun_s=min(bar.begun_s for bar in alike),
            ended_s=max(bar.ended_s for bar in alike),
            num_bytes=sum(bar.num_bytes for bar in alike),
            detail=alike[0].detail if len(alike) == 1 else "",
        )
        lines.append((whole, len(alike)))
    return lines


def _print_stages(waterfall: Waterfall) -> None:
    """Print the stages as one coloured strip, and its legend."""
    total, at = waterfall.seconds or 1e-9, 0.0
    strip, legend = Text("  "), Text("  ")
    for stage, seconds in waterfall.stages.items():
        begin, at = round(STRIP_CELLS * at / total), at + seconds
        strip.append("█" * (round(STRIP_CELLS * at / total) - begin), style=COLOURS[stage])
        if seconds > 0:
            legend.append("■ ", style=COLOURS[stage])
            legend.append(f"{STAGE_NAMES[stage]} {human_seconds(seconds)}   ")
    console().print(strip, legend, "", sep="\n")


def _bar(bar: WaterfallBar, span_s: float) -> Text:
    begin = min(BAR_CELLS - 1, int(BAR_CELLS * bar.begun_s / span_s))
    end = min(BAR_CELLS, max(begin + 1, round(BAR_CELLS * bar.ended_s / span_s)))
    if bar.step not in SPANS:
        return Text(" " * begin + "·", style=ENDS.get(bar.step, "dim"))
    return Text(" " * begin + "█" * (end - begin), style=COLOURS[SPANS[bar.step]])


def _details(bar: WaterfallBar, times: int) -> str:
    is_long = bar.ended_s > bar.begun_s and bar.step in SPANS
    parts = (
        f"×{times}" if times > 1 else "",
        human_seconds(bar.ended_s - bar.begun_s) if is_long else "",
        human_bytes(bar.num_bytes) if bar.num_bytes else "",
        bar.mode,
        bar.detail,
    )
    return " ".join(filter(None, parts))


def print_slow(waterfalls: Sequence[Waterfall]) -> None:
    """Print one line per room: how long it took, and the time of each stage."""
    out = console()
    if not waterfalls:
        out.print("no room has ended in the last 5 minutes")
        return
    table = Table(box=None)
    table.add_column("room", no_wrap=True)
    for name in ("took", *(STAGE_NAMES[stage] for stage in RoomStage)):
        table.add_column(name, justify="right")
    for name in ("outcome", "request"):
        table.add_column(name, no_wrap=True)
    for one in waterfalls:
        times = [
            Text(human_seconds(took), style="bold" if stage is one.longest_stage else "dim")
            for stage, took in one.stages.items()
        ]
        table.add_row(
            escape(one.room),
            human_seconds(one.seconds),
            *times,
            Text(one.outcome, style="red" if one.outcome == "failed" else ""),
            escape(one.request),
        )
    out.print(table)
    out.print(f"\nkvferry trace {escape(waterfalls[0].room)} shows the first of them step by step")
