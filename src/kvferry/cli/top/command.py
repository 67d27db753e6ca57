"""``kvferry top``: the cluster's status in a terminal, live."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from kvferry.cli.parsing import given, number
from kvferry.cli.printing import console, print_document
from kvferry.cli.status_flags import add_status_flags, status_client

EVERY_S = 1.0
EXAMPLE = """example:
  kvferry top                                          the cluster behind the router on port 8000
  kvferry top --url http://10.0.0.1:7077 --key cluster.key
  kvferry top --once                                   print once; --json for programs
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "top",
        help="watch a cluster in the terminal",
        description="Show instances, ranks, links, rooms and failures of a running cluster, live.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--every", metavar="S", help=f"seconds between updates ({EVERY_S:g})")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON document and exit")
    add_status_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status once, or update it until Ctrl-C."""
    from rich.live import Live  # noqa: PLC0415 - only needed here

    from kvferry.cli.top.output import render  # noqa: PLC0415

    every_s = number("--every", 0.1, 3600)(args.every) if given("--every", args.every) else EVERY_S
    client = status_client(args)
    status = client.cluster()
    if args.json:
        print_document(msgspec.to_builtins(status))
        return 0
    if args.once:
        console().print(render(status))
        return 0
    with Live(render(status), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(render(client.cluster()), refresh=True)
