"""``kvferry bench serve``: load on any endpoint with OpenAI's API."""

from __future__ import annotations

import argparse
import os

import msgspec
from rich.markup import escape

from kvferry.cli.bench.load import (
    Bar,
    cells,
    counted,
    finish,
    lengths,
    level_table,
    load_fields,
    load_of,
    plot_of,
    wide_console,
)
from kvferry.cli.load.plot import Series
from kvferry.cli.load.sweep import Load, Sweep, run_sweep
from kvferry.cli.parsing import given
from kvferry.cli.printing import print_document


def run(args: argparse.Namespace) -> int:
    """Read, measure, print, draw."""
    load = load_of(args, model=given("--model", args.model))
    figure = plot_of(args)
    api_key = given("--api-key", args.api_key) or os.environ.get("OPENAI_API_KEY")
    with Bar() as bar:
        sweep = run_sweep(args.url, load, bar, api_key=api_key)
    if args.json:
        measured = msgspec.to_builtins(sweep)
        print_document({"url": args.url, **load_fields(load), **measured, "error": sweep.failure})
    else:
        _print(sweep, load)
    title = f"{sweep.model}: {lengths(load)}"
    series = [Series(sweep.model, sweep.levels)]
    return finish(sweep.failure, figure, title, series)


def _print(sweep: Sweep, load: Load) -> None:
    console = wide_console()
    table = level_table()
    for level in sweep.levels:
        table.add_row(*cells(level))
    console.print(table)
    about = f"{sweep.model}, asked by {sweep.form}; {counted(sweep.levels)}"
    console.print(f"\n{escape(about)}", soft_wrap=True)
    console.print(f"no two prompts begin alike, so no prefix cache helps (seed {load.seed})")
