"""A waterfall in a terminal, and a table of the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.cli.printing import console
from kvferry.dashboard.drawing import WORDS, facts_of
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.steps import Moment
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

BAR_CELLS = 40
COLOURS = {
    RoomStage.PREFILL: "bright_black",
    RoomStage.PAGES: "yellow",
    RoomStage.WIRE: "blue",
    RoomStage.GATHER: "magenta",
    RoomStage.SCATTER: "green",
    RoomStage.CONTROL: "white",
}
ENDS = {Moment.DONE: "green", Moment.FAILED: "red"}


def print_waterfall(trace: Waterfall) -> None:
    """Everything, with the time running to the right."""
    out = console()
    out.print(f"[bold]room {escape(trace.room)}[/]")
    for name, value in facts_of(trace):
        out.print(f"  [dim]{name:<11}[/] {escape(value)}", soft_wrap=True)
    out.print(_strip(trace))
    out.print(_legend(trace))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("after", justify="right")
    for name in ("endpoint", "step", "peer"):
        table.add_column(name, no_wrap=True)
    table.add_column("", width=BAR_CELLS, no_wrap=True)
    table.add_column("", no_wrap=True)
    span_s = max((bar.ended_s for bar in trace.bars), default=0.0) or 1e-9
    for bar, times in merged(trace.bars):
        table.add_row(
            human_seconds(bar.begun_s),
            escape(bar.endpoint),
            Text(str(bar.step), style=ENDS.get(bar.step, "")),
            escape(bar.peer),
            _bar(bar, span_s),
            escape(_more(bar, times)),
        )
    out.print(table)


def merged(bars: Sequence[WaterfallBar]) -> list[tuple[WaterfallBar, int]]:
    """Neighbours of one kind as one line, with how many they were."""
    lines = []
    for _, group in groupby(bars, key=lambda bar: (bar.endpoint, bar.step, bar.peer, bar.mode)):
        alike = list(group)
        first = alike[0]
        whole = WaterfallBar(
            endpoint=first.endpoint,
            role=first.role,
            step=first.step,
            begun_s=min(bar.begun_s for bar in alike),
            ended_s=max(bar.ended_s for bar in alike),
            peer=first.peer,
            heard=first.heard,
            num_bytes=sum(bar.num_bytes for bar in alike),
            mode=first.mode,
            detail=first.detail if len(alike) == 1 else "",
        )
        lines.append((whole, len(alike)))
    return lines


def _strip(trace: Waterfall) -> Text:
    """Where the time went, as one line of colours."""
    total, line, at = trace.seconds or 1e-9, Text("  "), 0.0
    cells = 72
    for stage, seconds in trace.stages.items():
        begin, at = round(cells * at / total), at + seconds
        line.append("█" * (round(cells * at / total) - begin), style=COLOURS[stage])
    return line


def _legend(trace: Waterfall) -> Text:
    line = Text("  ")
    for stage, seconds in trace.stages.items():
        if seconds > 0:
            line.append("■ ", style=COLOURS[stage])
            line.append(f"{WORDS[stage]} {human_seconds(seconds)}   ")
    line.append("\n")
    return line


def _bar(bar: WaterfallBar, span_s: float) -> Text:
    begin = min(BAR_CELLS - 1, int(BAR_CELLS * bar.begun_s / span_s))
    end = min(BAR_CELLS, max(begin + 1, round(BAR_CELLS * bar.ended_s / span_s)))
    if bar.step not in SPANS:
        return Text(" " * begin + "·", style=ENDS.get(bar.step, "dim"))
    return Text(" " * begin + "█" * (end - begin), style=COLOURS[SPANS[bar.step]])


def _more(bar: WaterfallBar, times: int) -> str:
    parts = [f"×{times}"] if times > 1 else []
    if bar.ended_s > bar.begun_s and bar.step in SPANS:
        parts.append(human_seconds(bar.ended_s - bar.begun_s))
    if bar.num_bytes:
        parts.append(human_bytes(bar.num_bytes))
    return " ".join([*parts, *filter(None, (bar.mode, bar.detail))])


def print_slow(traces: Sequence[Waterfall]) -> None:
    """One line for each room: how long, and where that went."""
    out = console()
    if not traces:
        out.print("no room has ended in the last 5 minutes")
        return
    table = Table(box=None)
    table.add_column("room", no_wrap=True)
    for name in ("took", *(WORDS[stage] for stage in RoomStage)):
        table.add_column(name, justify="right")
    for name in ("outcome", "request"):
        table.add_column(name, no_wrap=True)
    for trace in traces:
        worst = trace.worst
        times = [
            Text(human_seconds(took), style="bold" if stage is worst else "dim")
            for stage, took in trace.stages.items()
        ]
        table.add_row(
            escape(trace.room),
            human_seconds(trace.seconds),
            *times,
            Text(trace.outcome, style="red" if trace.outcome == "failed" else ""),
            escape(trace.request),
        )
    out.print(table)
    out.print(f"\nkvferry trace {escape(traces[0].room)} shows the first of them step by step")
