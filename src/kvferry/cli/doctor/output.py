"""The output of ``kvferry doctor``: findings by area for people, a document for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.doctor.checks.check import Asked, Check, State

MARKS = {
    State.OK: "[green]ok[/]",
    State.NOTE: "[yellow]note[/]",
    State.PROBLEM: "[bold red]problem[/]",
}


def check_succeeded(checks: Sequence[Check]) -> bool:
    """Whether nothing stands in the way of what was asked."""
    return all(check.state is not State.PROBLEM for check in checks)


def as_json(checks: Sequence[Check]) -> str:
    """One document on one line."""
    return msgspec.json.encode({"checks": checks, "ok": check_succeeded(checks)}).decode()


def print_checks(asked: Asked, checks: Sequence[Check]) -> None:
    """A table for each area, and the verdict last."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for area, members in groupby(checks, key=lambda check: check.area):
        console.print(f"[bold]{escape(area)}[/]")
        console.print(_table(list(members)))
    console.print(_verdict(asked, checks), soft_wrap=True)


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column(width=7)
    table.add_column(min_width=16)
    table.add_column(overflow="fold")
    for check in checks:
        remedy = f"\n[bold]→ {escape(check.remedy)}[/]" if check.remedy else ""
        table.add_row(MARKS[check.state], escape(check.name), escape(check.detail) + remedy)
    return table


def _verdict(asked: Asked, checks: Sequence[Check]) -> str:
    what = f"{asked.transport}{'' if asked.on_host else ' on ' + asked.device}"
    problems = sum(check.state is State.PROBLEM for check in checks)
    if problems:
        word = "problem stands" if problems == 1 else "problems stand"
        return f"\n[bold red]{problems} {word} in the way of {escape(what)}.[/]"
    return f"\n[bold green]Nothing stands in the way of {escape(what)}.[/]"
