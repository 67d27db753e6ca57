"""The load of ``bench serve`` and ``bench compare``: its flags, its progress, its tables."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.plot import Series, demand_plot, draw
from kvferry.cli.load.stats import Level, Range, Spread
from kvferry.cli.load.sweep import Load
from kvferry.cli.parsing import given, number, one_line, whole
from kvferry.errors import InputError, KvferryError
from kvferry.plan.units import human_seconds

MAX_CONCURRENCY = 4096
MAX_TOKENS = MAX_REQUESTS = 1 << 20
MAX_DEADLINE_S = 86400
SEED_BITS = 32
EXIT_FAILED = 1
PIPE_WIDTH = 120


def load_of(args: argparse.Namespace, **more: Any) -> Load:
    """The load that the flags describe. A seed that nobody gave differs from run to run."""
    levels = [
        _count("--concurrency", text, MAX_CONCURRENCY) for text in args.concurrency.split(",")
    ]
    seed, requests = given("--seed", args.seed), given("--requests", args.requests)
    return Load(
        concurrency=tuple(levels),
        input_tokens=_count("--input-tokens", args.input_tokens, MAX_TOKENS),
        output_tokens=_count("--output-tokens", args.output_tokens, MAX_TOKENS),
        requests=_count("--requests", requests, MAX_REQUESTS) if requests else None,
        seed=whole("--seed", least=0)(seed) if seed else secrets.randbits(SEED_BITS),
        deadline_s=number("--deadline", 0.1, MAX_DEADLINE_S)(args.deadline),
        **more,
    )


def _count(flag: str, text: str, most: int) -> int:
    value = whole(flag)(text)
    if value > most:
        raise InputError(f"{flag} goes up to {most}, not {value}")
    return value


def plot_of(args: argparse.Namespace) -> Path | None:
    """Where the figure goes, checked before anything is measured; None if none is wanted."""
    name = given("--plot", args.plot)
    return None if name is None else demand_plot(name)


# ---------------------------------------------------------------- while it runs


class Bar:
    """A progress bar on standard error, if somebody looks at it; a ``load.sweep.Watcher``."""

    def __init__(self, prefix: str = "") -> None:
        console = Console(stderr=True)
        self._prefix = prefix
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[failed]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(f"{prefix}warming up", total=None, failed="")
        self._failed = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def says(self, text: str) -> None:
        """Something that is not counted is under way."""
        self._progress.reset(self._task, total=None, description=f"{self._prefix}{text}")

    def level(self, concurrency: int, num_requests: int) -> None:
        """A concurrency begins."""
        text = f"{self._prefix}{concurrency} at once"
        self._progress.reset(self._task, total=num_requests, description=text)

    def answered(self, reply: LoadReply) -> None:
        """One request has ended."""
        self._failed += bool(reply.error)
        failed = f"[red]{self._failed} failed[/]" if self._failed else ""
        self._progress.update(self._task, advance=1, failed=failed)


# ---------------------------------------------------------------- the end

COLUMNS = (
    "at once",
    "requests",
    "failed",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "requests/s",
    "tokens/s",
)


def wide_console() -> Console:
    """As wide as the terminal, or wide enough for the table where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def level_table(first_column: str | None = None) -> Table:
    """An empty table of levels."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    if first_column:
        table.add_column(first_column)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def cells(level: Level) -> list[str]:
    """A level as a row of the table."""
    failed = f"[bold red]{level.failed}[/]" if level.failed else "0"
    return [
        str(level.concurrency),
        str(level.requests),
        failed,
        *_spread(level.ttft_s),
        *_spread(level.tpot_s),
        f"{level.requests_per_s:.2f}",
        f"{level.output_tokens_per_s:.1f}",
    ]


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return human_seconds(spread.p50), human_seconds(spread.p99)


def counted(levels: Sequence[Level]) -> str:
    """How long the server says that questions and answers were."""
    prompts = [level.prompt_tokens for level in levels if level.prompt_tokens]
    answers = [level.output_tokens for level in levels if level.output_tokens]
    if not prompts:
        return "the server did not say how many tokens it counted"
    shown = (
        Range(min(one.least for one in ranges), max(one.most for one in ranges))
        for ranges in (prompts, answers)
    )
    return "the server counted {} prompt tokens and {} output tokens in each".format(*shown)


def finish(failure: str | None, figure: Path | None, title: str, series: Sequence[Series]) -> int:
    """Draw, say what went wrong, and give the exit status; results are printed already."""
    problems = [failure] if failure else []
    try:
        if figure is not None:
            draw(figure, title, series)
    except KvferryError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"kvferry: {one_line(problem)}", file=sys.stderr)
    return EXIT_FAILED if problems else 0


def lengths(load: Load) -> str:
    """What was asked, for a title."""
    return f"{load.input_tokens} tokens in, {load.output_tokens} out"


def load_fields(load: Load) -> Mapping[str, Any]:
    """What was asked, for a document."""
    return {
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "seed": load.seed,
    }
