"""A cluster's status as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.status import ClusterStatus, InstanceStatus, LinkStatus, RankState

MAX_ROOMS, MAX_FAILURES = 10, 5
COLOURS = {
    RankState.UP: "green",
    RankState.TROUBLED: "yellow",
    RankState.SILENT: "yellow",
    RankState.GONE: "bold red",
    RankState.MISSING: "bold red",
}


def render(status: ClusterStatus) -> RenderableType:
    """Return the whole status."""
    parts: list[RenderableType] = [_headline(status)]
    if status.problem:
        parts.append(Text(status.problem, style="red"))
    tables = [_instances(status.instances)]
    if status.links:
        tables.append(_links(status.links))
    if status.rooms:
        tables.append(_rooms(status))
    if status.failures:
        tables.append(_failures(status))
    return Group(*parts, *(part for table in tables for part in (Text(), table)))


def _headline(status: ClusterStatus) -> Text:
    ranks = [rank for one in status.instances for rank in one.ranks]
    up = sum(rank.state in (RankState.UP, RankState.TROUBLED) for rank in ranks)
    line = Text("kvferry  ", style="bold")
    line.append(f"{_rate(status.bytes_per_s)}  {status.rooms_per_s:.1f} rooms/s  ")
    line.append(f"{status.num_open} open  ")
    line.append(f"{up}/{len(ranks)} ranks up", style="" if up == len(ranks) else "bold red")
    return line


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(int(bytes_per_s))}/s" if bytes_per_s >= 1 else "idle"


def _table(*left: str, right: tuple[str, ...] = (), last: str | None = None) -> Table:
    """Return a table with columns aligned left, then right; ``last`` may wrap."""
    table = Table(box=None)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last)
    return table


def _instances(instances: Iterable[InstanceStatus]) -> Table:
    figures = ("rooms", "pages held", "staging", "sends")
    table = _table("instance", "side", "sharding", "ranks", right=figures, last="")
    table.columns[3].no_wrap = False
    for one in instances:
        ranks = Text()
        for rank in one.ranks:
            ranks.append(f"{rank.rank} ", style=COLOURS[rank.state])
        held = sum(rank.pages_held for rank in one.ranks)
        table.add_row(
            escape(one.name),
            "prefill" if one.role == "source" else "decode",
            escape(f"{one.sharding.split(',')[0]} {one.transport}"),
            ranks,
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

    table = _table("from", "to", "up", "transport", "mode", right=("now", "total"))
    for (source, target), group in groupby(sorted(links, key=pair), key=pair):
        both = list(group)
        up = sum(link.state == "up" for link in both)
        busiest = max(both, key=lambda link: (link.bytes_per_s, link.num_bytes))
        table.add_row(
            escape(source),
            escape(target),
            Text(f"{up}/{len(both)}", style="" if up == len(both) else "red"),
            ", ".join(sorted({link.transport for link in both})),
            busiest.mode or "–",
            _rate(sum(link.bytes_per_s for link in both)),
            human_bytes(sum(link.num_bytes for link in both)),
        )
    return table


def _rooms(status: ClusterStatus) -> Table:
    table = _table("room", "status", "open for", "request")
    for room in status.rooms[:MAX_ROOMS]:
        age = human_seconds(room.seconds)
        table.add_row(escape(room.room), room.status, age, escape(room.request))
    return table


def _failures(status: ClusterStatus) -> Table:
    table = _table("failed", "ago", "endpoint", last="reason")
    for one in status.failures[:MAX_FAILURES]:
        reason = escape(f"{one.code}: {one.reason}")
        table.add_row(escape(one.room), human_seconds(one.ago_s), escape(one.endpoint), reason)
    return table
