"""``kvferry top``: what the page shows, in a terminal, until Ctrl-C."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from kvferry.cli.parsing import given, number
from kvferry.cli.printing import console, print_document
from kvferry.cli.status_flags import add_looking, token_of, url_of

EVERY_S = 1.0
EXAMPLE = """example:
  kvferry top                                          the cluster behind the router on port 8000
  kvferry top --url http://10.0.0.1:7077 --key cluster.key
  kvferry top --once                                   one look; --json for programs
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "top",
        help="watch a cluster in the terminal",
        description="Show instances, ranks, links, rooms and failures of a running cluster, live.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--every", metavar="S", help=f"seconds between looks ({EVERY_S:g})")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON document, once")
    add_looking(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, show, and again."""
    # Only now: other commands need nothing of this.
    from rich.live import Live  # noqa: PLC0415

    from kvferry.cli.top.output import shown  # noqa: PLC0415
    from kvferry.dashboard.client import StatusClient  # noqa: PLC0415

    every_s = number("--every", 0.1, 3600)(args.every) if given("--every", args.every) else EVERY_S
    client = StatusClient(url_of(args), token_of(args))
    view = client.cluster()
    if args.json:
        print_document(msgspec.to_builtins(view))
        return 0
    if args.once:
        console().print(shown(view))
        return 0
    with Live(shown(view), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(shown(client.cluster()), refresh=True)
