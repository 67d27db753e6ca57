"""``kvferry trace``: the waterfall of a room, or the slowest rooms of the last minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from kvferry.cli.files import write_text
from kvferry.cli.parsing import given, whole
from kvferry.cli.printing import console, print_document
from kvferry.cli.status_flags import add_status_flags, status_client
from kvferry.dashboard.client import UnknownRoom
from kvferry.dashboard.drawing import STAGE_NAMES, details, facts_of, merged, waterfall_page
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

MAX_SLOW = 10
BAR_CELLS = 40
EXAMPLE = """example:
  kvferry trace 7131865401186524032                    the waterfall of that room
  kvferry trace 7131865401186524032 --html room.html   the same as a web page
  kvferry trace --slow                                 the slowest rooms of the last 5 minutes
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
    parser.add_argument("--slow", action="store_true", help="the slowest of the last 5 minutes")
    parser.add_argument("--num", metavar="N", help="number of slow rooms (default: 5)")
    parser.add_argument("--html", metavar="FILE", help="write the waterfall to this page")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_status_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one room's waterfall, or the slowest rooms."""
    _check(args)
    if args.slow:
        return _print_slow(args)
    waterfall = status_client(args).trace(args.room)
    if given("--html", args.html):
        write_text(args.html, waterfall_page(waterfall))
    if args.json:
        print_document(msgspec.to_builtins(waterfall))
    else:
        _print_waterfall(waterfall)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.slow and args.room:
        raise InputError("a room's id and --slow exclude each other; give one of them")
    if not args.slow and not args.room:
        raise InputError("give the id of a room, or --slow; see kvferry trace --help")
    if args.num is not None and not args.slow:
        raise InputError("--num limits the rooms of --slow; leave it out, or give --slow")
    if args.slow and args.html:
        raise InputError("--html draws one room; give its id instead of --slow")


def _print_slow(args: argparse.Namespace) -> int:
    num = whole("--num")(args.num) if given("--num", args.num) else 5
    client = status_client(args)
    waterfalls = []
    for room in client.cluster().slow[: min(num, MAX_SLOW)]:
        try:
            waterfalls.append(client.trace(room.room))
        except UnknownRoom:
            # Its endpoints have dropped it since.
            continue
    waterfalls.sort(key=lambda one: -one.seconds)
    if args.json:
        print_document({"rooms": [msgspec.to_builtins(one) for one in waterfalls]})
    else:
        _print_table(waterfalls)
    return 0


def _print_waterfall(waterfall: Waterfall) -> None:
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


def _print_table(waterfalls: Sequence[Waterfall]) -> None:
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
