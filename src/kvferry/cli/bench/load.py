"""``kvferry bench serve``, and what it shares with ``compare``: load flags, progress, tables."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.markup import escape
from rich.table import Table

from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.plot import Series, check_plot_path, draw
from kvferry.cli.load.stats import Level, Range, Spread
from kvferry.cli.load.sweep import Load, run_sweep
from kvferry.cli.parsing import given, number, one_line, whole
from kvferry.cli.printing import console, counting_bar, print_document
from kvferry.errors import InputError, KvferryError
from kvferry.plan.units import human_seconds

MAX_CONCURRENCY = 4096
MAX_TOKENS = MAX_REQUESTS = 1 << 20
MAX_DEADLINE_S = 86400
SEED_BITS = 32
EXIT_FAILED = 1
COLUMNS = (
    *("at once", "requests", "failed", "TTFT p50", "p99"),
    *("TPOT p50", "p99", "requests/s", "tokens/s"),
)


def run(args: argparse.Namespace) -> int:
    """Measure an endpoint, print the levels, and draw them."""
    load = load_of(args, model=given("--model", args.model))
    plot = plot_path(args)
    api_key = given("--api-key", args.api_key) or os.environ.get("OPENAI_API_KEY")
    with LoadProgress() as progress:
        sweep = run_sweep(args.url, load, progress, api_key=api_key)
    if args.json:
        document = {"url": args.url, **load.settings, **msgspec.to_builtins(sweep)}
        print_document(document | {"error": sweep.failure})
    else:
        out, table = console(), level_table()
        for level in sweep.levels:
            table.add_row(*level_cells(level))
        out.print(table)
        about = f"{sweep.model}, asked by {sweep.form}; {token_counts(sweep.levels)}"
        out.print(f"\n{escape(about)}", soft_wrap=True)
        out.print(f"no two prompts begin alike, so no prefix cache helps (seed {load.seed})")
    series = [Series(sweep.model, sweep.levels)]
    return finish(sweep.failure, plot, f"{sweep.model}: {load.lengths}", series)


def load_of(args: argparse.Namespace, **more: Any) -> Load:
    """Return the load that the flags describe, with a random seed unless one is given."""

    def count(flag: str, text: str, most: int) -> int:
        value = whole(flag)(text)
        if value > most:
            raise InputError(f"{flag} must be at most {most}, not {value}")
        return value

    seed, requests = given("--seed", args.seed), given("--requests", args.requests)
    return Load(
        concurrency=tuple(
            count("--concurrency", text, MAX_CONCURRENCY) for text in args.concurrency.split(",")
        ),
        input_tokens=count("--input-tokens", args.input_tokens, MAX_TOKENS),
        output_tokens=count("--output-tokens", args.output_tokens, MAX_TOKENS),
        requests=count("--requests", requests, MAX_REQUESTS) if requests else None,
        seed=whole("--seed", least=0)(seed) if seed else secrets.randbits(SEED_BITS),
        deadline_s=number("--deadline", 0.1, MAX_DEADLINE_S)(args.deadline),
        **more,
    )


def plot_path(args: argparse.Namespace) -> Path | None:
    """Return the figure's path, checked before anything is measured; None without ``--plot``."""
    name = given("--plot", args.plot)
    return None if name is None else check_plot_path(name)


class LoadProgress:
    """A progress bar that watches a sweep."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix, self._num_failed = prefix, 0
        self._bar = counting_bar()
        self._task = self._bar.add_task(f"{prefix}warming up", total=None, result="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def show(self, text: str, total: int | None = None) -> None:
        """Describe the current step."""
        self._bar.reset(self._task, total=total, description=f"{self._prefix}{text}")

    def level(self, concurrency: int, num_requests: int) -> None:
        """Start the count of a level."""
        self.show(f"{concurrency} at once", num_requests)

    def answered(self, reply: LoadReply) -> None:
        """Count one ended request."""
        self._num_failed += bool(reply.error)
        failed = f"[red]{self._num_failed} failed[/]" if self._num_failed else ""
        self._bar.update(self._task, advance=1, result=failed)


# ---------------------------------------------------------------- output


def level_table(first_column: str | None = None) -> Table:
    """Return an empty table of levels."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    if first_column:
        table.add_column(first_column)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def level_cells(level: Level) -> list[str]:
    """Return a level as a row of the table."""

    def cells(spread: Spread | None) -> tuple[str, str]:
        return (human_seconds(spread.p50), human_seconds(spread.p99)) if spread else ("-", "-")

    failed = f"[bold red]{level.failed}[/]" if level.failed else "0"
    counts = (str(level.concurrency), str(level.requests), failed)
    rates = (f"{level.requests_per_s:.2f}", f"{level.output_tokens_per_s:.1f}")
    return [*counts, *cells(level.ttft_s), *cells(level.tpot_s), *rates]


def token_counts(levels: Sequence[Level]) -> str:
    """Return a sentence about the prompt and output tokens that the server counted."""
    prompts = [level.prompt_tokens for level in levels if level.prompt_tokens]
    answers = [level.output_tokens for level in levels if level.output_tokens]
    if not prompts:
        return "the server did not say how many tokens it counted"
    prompt, answer = (
        Range(min(one.least for one in ranges), max(one.most for one in ranges))
        for ranges in (prompts, answers)
    )
    return f"the server counted {prompt} prompt tokens and {answer} output tokens in each"


def finish(failure: str | None, plot: Path | None, title: str, series: Sequence[Series]) -> int:
    """Draw the figure, print the failures, and return the exit status."""
    problems = [failure] if failure else []
    try:
        if plot is not None:
            draw(plot, title, series)
    except KvferryError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"kvferry: {one_line(problem)}", file=sys.stderr)
    return EXIT_FAILED if problems else 0
