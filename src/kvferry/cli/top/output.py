"""A cluster's view as tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.reports import ClusterView, InstanceShown, LinkShown, RankState

MOST_ROOMS, MOST_FAILURES = 10, 5
COLOURS = {
    RankState.UP: "green",
    RankState.TROUBLED: "yellow",
    RankState.SILENT: "yellow",
    RankState.GONE: "bold red",
    RankState.MISSING: "bold red",
}


def shown(view: ClusterView) -> RenderableType:
    """Everything, one below the other."""
    parts: list[RenderableType] = [_headline(view)]
    if view.problem:
        parts.append(Text(view.problem, style="red"))
    parts += [Text(), _instances(view.instances)]
    if view.links:
        parts += [Text(), _links(view.links)]
    if view.rooms:
        parts += [Text(), _rooms(view)]
    if view.failures:
        parts += [Text(), _failures(view)]
    return Group(*parts)


def _headline(view: ClusterView) -> Text:
    ranks = [rank for one in view.instances for rank in one.ranks]
    up = sum(rank.state in (RankState.UP, RankState.TROUBLED) for rank in ranks)
    line = Text("kvferry  ", style="bold")
    line.append(f"{rate(view.bytes_per_s)}  {view.rooms_per_s:.1f} rooms/s  {view.num_open} open  ")
    line.append(f"{up}/{len(ranks)} ranks up", style="" if up == len(ranks) else "bold red")
    return line


def rate(bytes_per_s: float) -> str:
    """What flows now."""
    return f"{human_bytes(int(bytes_per_s))}/s" if bytes_per_s >= 1 else "idle"


def _instances(instances: Iterable[InstanceShown]) -> Table:
    table = Table(box=None)
    for name in ("instance", "side", "sharding", "ranks"):
        table.add_column(name, no_wrap=name != "ranks")
    for name in ("rooms", "pages held", "staging", "sends"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in instances:
        held, pages = (sum(getattr(r, n) for r in one.ranks) for n in ("pages_held", "pages"))
        used = sum(rank.staging_used_bytes for rank in one.ranks)
        table.add_row(
            escape(one.name),
            "prefill" if one.role == "source" else "decode",
            escape(f"{one.sharding.split(',')[0]} {one.transport}"),
            _ranks(one),
            str(sum(rank.num_open for rank in one.ranks)),
            f"{held}/{pages}",
            human_bytes(used),
            rate(sum(rank.bytes_per_s for rank in one.ranks)),
            Text(one.note, style="red"),
        )
    return table


def _ranks(one: InstanceShown) -> Text:
    line = Text()
    for rank in one.ranks:
        line.append(f"{rank.rank} ", style=COLOURS[rank.state])
    return line


def _links(links: Iterable[LinkShown]) -> Table:
    """By pairs of instances: ranks make too many."""
    table = Table(box=None)
    for name in ("from", "to", "up", "transport", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("now", "in all"):
        table.add_column(name, justify="right")

    def pair(link: LinkShown) -> tuple[str, str]:
        return link.source.rpartition("/")[0], link.target.rpartition("/")[0]

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
            rate(sum(link.bytes_per_s for link in both)),
            human_bytes(sum(link.num_bytes for link in both)),
        )
    return table


def _rooms(view: ClusterView) -> Table:
    table = Table(box=None)
    for name in ("room", "status", "since", "request"):
        table.add_column(name, no_wrap=True)
    for room in view.rooms[:MOST_ROOMS]:
        since = human_seconds(room.seconds)
        table.add_row(escape(room.room), room.status, since, escape(room.request))
    return table


def _failures(view: ClusterView) -> Table:
    table = Table(box=None)
    for name in ("failed", "ago", "where", "why"):
        table.add_column(name, no_wrap=name != "why")
    for one in view.failures[:MOST_FAILURES]:
        why = f"{one.code}: {one.reason}"
        table.add_row(escape(one.room), human_seconds(one.ago_s), escape(one.endpoint), escape(why))
    return table
