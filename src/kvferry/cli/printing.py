"""Printing that commands share: JSON documents, refusals, and the console."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvferry.errors import Reason
from kvferry.plan import TransferMode

# The exit status of a command that was refused.
EXIT_REFUSED = 3


def print_document(document: dict[str, Any]) -> None:
    """One JSON document on one line."""
    # The standard library's encoder, because it writes whole numbers of any size.
    print(json.dumps(document, separators=(",", ":")))


def print_refusal(reasons: Sequence[Reason], *, heading: str, as_json: bool) -> None:
    """Every reason why it can't work."""
    if as_json:
        empty = {path: {"pieces": 0, "bytes": 0, "open": False} for path in TransferMode}
        print_document(
            {
                "compatible": False,
                "reasons": [{"code": r.code, "message": r.message} for r in reasons],
                "digest": None,
                "bytes": 0,
                "moves": [],
                "paths": empty,
                "chosen": None,
            }
        )
        return
    out = console()
    out.print(f"[bold red]{escape(heading)}[/]")
    for reason in reasons:
        out.print(f"  {escape(reason.message)} [dim]({reason.code})[/]", soft_wrap=True)


def console() -> Console:
    """A console that wraps for a terminal, and does not squeeze tables into a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)
