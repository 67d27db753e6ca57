"""``kvferry trace``: the trace of a room, or the slowest of the last minutes."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from kvferry.cli.files import write_text
from kvferry.cli.parsing import given, whole
from kvferry.cli.printing import print_document
from kvferry.cli.status_flags import add_looking, token_of, url_of
from kvferry.errors import InputError

MOST_SLOW = 10
EXAMPLE = """example:
  kvferry trace 7131865401186524032                    a waterfall of that room
  kvferry trace 7131865401186524032 --html room.html   the same, drawn
  kvferry trace --slow                                 the worst rooms of the last 5 minutes
  kvferry trace --slow --url http://10.0.0.1:7077 --key cluster.key

A room's id is in the answer's field kvferry.room, and in every log line about it.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "trace",
        help="show where a room's time went",
        description="Show every step of a ROOM on both sides, on one clock, and where its time "
        "went; or find the slowest of the last minutes.",
        epilog=EXAMPLE,
    )
    parser.add_argument("room", metavar="ROOM", nargs="?", help="the room's id")
    parser.add_argument("--slow", action="store_true", help="the worst of the last 5 minutes")
    parser.add_argument("--num", metavar="N", help="how many of the slow ones (default: 5)")
    parser.add_argument("--html", metavar="FILE", help="draw the room into this page")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_looking(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, print."""
    if args.slow and args.room:
        raise InputError("give the id of a room, or --slow, and not both")
    if not args.slow and not args.room:
        raise InputError("give the id of a room, or --slow; see kvferry trace --help")
    if args.num is not None and not args.slow:
        raise InputError("--num says how many rooms --slow shows; leave it out, or give --slow")
    # Only now: other commands need nothing of this.
    from kvferry.dashboard.client import StatusClient  # noqa: PLC0415

    client = StatusClient(url_of(args), token_of(args))
    if args.slow:
        return _slow(client, args)
    from kvferry.cli.trace.output import print_waterfall  # noqa: PLC0415
    from kvferry.dashboard.drawing import waterfall_page  # noqa: PLC0415

    trace = client.trace(args.room)
    if given("--html", args.html):
        write_text(args.html, waterfall_page(trace))
    if args.json:
        print_document(msgspec.to_builtins(trace))
    else:
        print_waterfall(trace)
    return 0


def _slow(client: Any, args: argparse.Namespace) -> int:
    from kvferry.cli.trace.output import print_slow  # noqa: PLC0415
    from kvferry.dashboard.client import UnknownRoom  # noqa: PLC0415

    if args.html:
        raise InputError("--html draws one room; give its id instead of --slow")
    num = whole("--num")(args.num) if given("--num", args.num) else 5
    traces = []
    for room in client.cluster().slow[: min(num, MOST_SLOW)]:
        try:
            traces.append(client.trace(room.room))
        except UnknownRoom:
            # Its endpoints have had many others since.
            continue
    traces.sort(key=lambda trace: -trace.seconds)
    if args.json:
        print_document({"rooms": [msgspec.to_builtins(trace) for trace in traces]})
    else:
        print_slow(traces)
    return 0
