"""``kvferry trace``: the waterfall of a room, or the slowest rooms of the last minutes."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from kvferry.cli.files import write_text
from kvferry.cli.parsing import given, whole
from kvferry.cli.printing import print_document
from kvferry.cli.status_flags import add_status_flags, status_client
from kvferry.errors import InputError

MAX_SLOW = 10
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
    from kvferry.cli.trace.output import print_waterfall  # noqa: PLC0415 - only needed here
    from kvferry.dashboard.drawing import waterfall_page  # noqa: PLC0415

    waterfall = status_client(args).trace(args.room)
    if given("--html", args.html):
        write_text(args.html, waterfall_page(waterfall))
    if args.json:
        print_document(msgspec.to_builtins(waterfall))
    else:
        print_waterfall(waterfall)
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
    from kvferry.cli.trace.output import print_slow  # noqa: PLC0415 - only needed here
    from kvferry.dashboard.client import UnknownRoom  # noqa: PLC0415

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
        print_slow(waterfalls)
    return 0
