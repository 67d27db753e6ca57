"""``kvferry top``: the cluster's status in a terminal, live."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.cli.printing import console, print_document
from kvferry.cli.status_flags import add_status_flags, status_client
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.status import ALIVE, ClusterStatus, InstanceStatus, LinkStatus, RankState

EVERY_S = 1.0
MAX_ROOMS, MAX_FAILURES = 10, 5
COLOURS = {RankState.UP: "green", RankState.TROUBLED: "yellow", RankState.SILENT: "yellow"}
EXAMPLE = """example:
  kvferry top                                          the cluster behind the router on port 8000
  kvferry top --url http://10.0.0.1:7077 --key cluster.key
  kvferry top --discovery etcd://10.0.0.1:2379/kvferry
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
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON document and exit")
    add_status_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the status once, or update it until Ctrl-C."""
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
            time.sleep(EVERY_S)
            live.update(render(client.cluster()), refresh=True)


def render(status: ClusterStatus) -> RenderableType:
    """Return the whole status."""
    tables = [_instances(status.instances), _links(status.links), _rooms(status), _failures(status)]
    shown = [part for table in tables if table.rows for part in (Text(), table)]
    problem = [Text(status.problem, style="red")] if status.problem else []
    return Group(_headline(status), *problem, *shown)


def _headline(status: ClusterStatus) -> str:
    ranks = [rank for one in status.instances for rank in one.ranks]
    up = sum(rank.state in ALIVE for rank in ranks)
    return (
        f"[bold]kvferry[/]  {_rate(status.bytes_per_s)}  {status.rooms_per_s:.1f} rooms/s  "
        f"{status.num_open} open  [{'default' if up == len(ranks) else 'bold red'}]"
        f"{up}/{len(ranks)} ranks up[/]"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(int(bytes_per_s))}/s" if bytes_per_s >= 1 else "idle"


def _instances(instances: Iterable[InstanceStatus]) -> Table:
    columns = ("instance", "side", "sharding", "ranks", "rooms", "pages held", "staging", "sends")
    table = Table(*columns, "", box=None)
    for one in instances:
        styled = [(f"{rank.rank} ", COLOURS.get(rank.state, "bold red")) for rank in one.ranks]
        held = sum(rank.pages_held for rank in one.ranks)
        table.add_row(
            escape(one.name),
            "prefill" if one.role == "source" else "decode",
            escape(f"{one.sharding.split(',')[0]} {one.transport}"),
            Text.assemble(*styled),
            str(sum(rank.num_open for rank in one.ranks)),
            f"{held}/{sum(rank.pages for rank in one.ranks)}",
            human_bytes(sum(rank.staging_used_bytes for rank in one.ranks)),
            _rate(sum(rank.bytes_per_s for rank in one.ranks)),
            Text(one.note, style="red"),
        )
    return table


def _links(links: Iterable[LinkStatus]) -> Table:
    """Return links by pairs of instances, because there are too many pairs of ranks."""

    def pair(link: LinkStatus) -> tuple[str, str]:
        return link.source.rpartition("/")[0], link.target.rpartition("/")[0]

    table = Table("from", "to", "up", "transport", "mode", "now", "total", box=None)
    for (source, target), group in groupby(sorted(links, key=pair), key=pair):
        both = list(group)
        up = sum(link.state == "up" for link in both)
        table.add_row(
            escape(source),
            escape(target),
            Text(f"{up}/{len(both)}", style="" if up == len(both) else "red"),
            ", ".join(sorted({link.transport for link in both})),
            ", ".join(sorted({link.mode for link in both if link.mode})) or "–",
            _rate(sum(link.bytes_per_s for link in both)),
            human_bytes(sum(link.num_bytes for link in both)),
        )
    return table


def _rooms(status: ClusterStatus) -> Table:
    table = Table("room", "status", "open for", "request", box=None)
    for room in status.rooms[:MAX_ROOMS]:
        age = human_seconds(room.seconds)
        table.add_row(escape(room.room), room.status, age, escape(room.request))
    return table


def _failures(status: ClusterStatus) -> Table:
    table = Table("failed", "ago", "endpoint", "reason", box=None)
    for one in status.failures[:MAX_FAILURES]:
        reason = escape(f"{one.code}: {one.reason}")
        table.add_row(escape(one.room), human_seconds(one.ago_s), escape(one.endpoint), reason)
    return table
