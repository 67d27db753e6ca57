"""Thousands of rooms between real processes that are killed, stopped and restarted.

    .venv/bin/python benchmarks/soak.py --rooms 10000 --transport shm

Every room must end at every living rank, every room that is done must have the right bytes, nobody
may write into released memory, tables must be empty at the end, and ranks that were never killed
must not have grown. It takes minutes, at most ``--limit-s``. The last line is JSON; the exit status
is 1 if there was a problem.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.testing.fleet.soak import SoakPlan, SoakReport, soak

# Interval of progress lines where there is no terminal for a progress bar.
LINE_EVERY_S = 15.0


def main() -> int:
    report = run_with_progress(plan_from(sys.argv[1:]))
    print(msgspec.json.encode(report).decode())
    return 0 if report.good else 1


def plan_from(words: list[str]) -> SoakPlan:
    default = SoakPlan()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", type=int, default=default.rooms)
    parser.add_argument("--at-once", type=int, default=default.at_once)
    parser.add_argument("--transport", default=default.transport)
    parser.add_argument("--kills", type=int, help="(one for every 150 rooms)")
    parser.add_argument("--stops", type=int, help="(one for every 150 rooms)")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--limit-s", type=float, default=default.limit_s)
    args = parser.parse_args(words)
    faults = -(-args.rooms // 150)
    return SoakPlan(
        rooms=args.rooms,
        at_once=args.at_once,
        transport=args.transport,
        kills=faults if args.kills is None else args.kills,
        stops=faults if args.stops is None else args.stops,
        seed=args.seed,
        limit_s=args.limit_s,
    )


def run_with_progress(plan: SoakPlan) -> SoakReport:
    """Run the soak and show its progress."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=plan.rooms)
        line_at = 0.0

        def show(rooms: int, summary: str) -> None:
            nonlocal line_at
            progress.update(task, completed=rooms, description=summary)
            if not console.is_terminal and time.monotonic() >= line_at:
                line_at = time.monotonic() + LINE_EVERY_S
                console.print(f"{rooms} of {plan.rooms} rooms: {summary}", highlight=False)

        return soak(plan, show)


if __name__ == "__main__":
    sys.exit(main())
