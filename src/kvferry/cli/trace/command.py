"""``kvferry trace``: the waterfall of a room, or the slowest rooms of the last minutes."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.cli.printing import console, print_document
from kvferry.cli.status_flags import add_status_flags, status_client
from kvferry.dashboard.drawing import details, facts_of, merged
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds
from kvferry.telemetry.waterfall import SPANS, Waterfall, WaterfallBar

BAR_CELLS = 32
EXAMPLE = """example:
  kvferry trace 7131865401186524032                    the waterfall of that room
  kvferry trace --slow --discovery etcd://10.0.0.1:2379/kvferry    the slowest of 5 minutes
  kvferry trace --slow --url http://10.0.0.1:7077 --key cluster.key

A room's id is in the response's field kvferry.room and in every log line about the room.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "trace",
        help="show where a room's time went",
        description="Show every step of a ROOM on both sides, on one clock, and where its time "
        "went; or list the slowest rooms of the last minutes.",
        epilog=EXAMPLE,
    )
    parser.add_argument("room", metavar="ROOM", nargs="?", help="the room's id")
    parser.add_argument(
        "--slow", action="store_true", help="the slowest rooms of the last 5 minutes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_status_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one room's waterfall, or the slowest rooms."""
    if bool(args.room) == args.slow:
        raise InputError("give either the id of a room or --slow; see kvferry trace --help")
    if args.slow:
        return _print_slow(args)
    waterfall = status_client(args).trace(args.room)
    if args.json:
        print_document(msgspec.to_builtins(waterfall))
    else:
        console().print(render(waterfall))
    return 0


def _print_slow(args: argparse.Namespace) -> int:
    slow = status_client(args).cluster().slow
    if args.json:
        print_document({"rooms": msgspec.to_builtins(slow)})
        return 0
    table = Table("room", "took", "request", box=None)
    for room in slow:
        table.add_row(escape(room.room), human_seconds(room.seconds), escape(room.request))
    console().print(table if slow else "no room has ended in the last 5 minutes")
    return 0


def render(waterfall: Waterfall) -> RenderableType:
    """Return facts and steps, with time running to the right."""
    facts = [
        Text.assemble((f"  {name:<12}", "dim"), value, no_wrap=True, overflow="ignore")
        for name, value in facts_of(waterfall)
    ]
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
    return Group(Text(f"room {waterfall.room}", style="bold"), *facts, table)


def _timeline(bar: WaterfallBar, span_s: float) -> str:
    begin = min(BAR_CELLS - 1, int(BAR_CELLS * bar.begun_s / span_s))
    end = min(BAR_CELLS, max(begin + 1, round(BAR_CELLS * bar.ended_s / span_s)))
    return " " * begin + ("█" * (end - begin) if bar.step in SPANS else "·")
