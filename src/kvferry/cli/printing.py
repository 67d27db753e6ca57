"""Printing that commands share: JSON documents, refusals, and the console."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.errors import Reason
from kvferry.plan import TransferMode

# Exit status of a command whose layouts do not fit.
EXIT_REFUSED = 3


def print_document(document: dict[str, Any]) -> None:
    """Print one JSON document on one line."""
    # msgspec refuses integers above 64 bits.
    print(json.dumps(document, separators=(",", ":")))


def print_refusal(reasons: Sequence[Reason], *, heading: str, as_json: bool) -> None:
    """Print every reason of a refusal."""
    if as_json:
        empty = {mode: {"pieces": 0, "bytes": 0, "open": False} for mode in TransferMode}
        print_document(
            {
                "compatible": False,
                "reasons": [{"code": r.code, "message": r.message} for r in reasons],
                "digest": None,
                "bytes": 0,
                "moves": [],
                "modes": empty,
                "chosen": None,
            }
        )
        return
    out = console()
    out.print(f"[bold red]{escape(heading)}[/]")
    for reason in reasons:
        out.print(f"  {escape(reason.message)} [dim]({reason.code})[/]", soft_wrap=True)


def console() -> Console:
    """Return a console: as wide as the terminal, 120 columns into a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def counting_bar() -> Progress:
    """Return a progress bar on standard error, hidden unless that is a terminal.

    Tasks have a field ``result`` for the result so far.
    """
    stderr = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[result]}"),
        console=stderr,
        disable=not stderr.is_terminal,
        transient=True,
    )
