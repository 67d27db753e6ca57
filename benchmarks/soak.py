"""Thousands of rooms between real processes that are killed, stopped and restarted meanwhile.

    .venv/bin/python benchmarks/soak.py --rooms 10000 --transport shm

Every room must end at every rank that lives, every room that is done must have the right
bytes, nobody may write into released memory, tables must be empty at the end, and ranks
that lived through it must not have grown. Takes minutes, and ends by itself after
``--limit-s``. Ends in one JSON line; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.testing.fleet.soak import SoakPlan, SoakReport, soak

# Where nobody watches a bar, a line now and then shows that it goes on.
LINE_EVERY_S = 15.0


def main() -> int:
    report = watched(plan_from(sys.argv[1:]))
    print(msgspec.json.encode(report).decode())
    return 0 if report.good else 1


def plan_from(words: list[str]) -> SoakPlan:
    usual = SoakPlan()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", type=int, default=usual.rooms)
    parser.add_argument("--at-once", type=int, default=usual.at_once)
    parser.add_argument("--transport", default=usual.transport)
    parser.add_argument("--kills", type=int, help="one for every 150 rooms unless said")
    parser.add_argument("--stops", type=int, help="one for every 150 rooms unless said")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--limit-s", type=float, default=usual.limit_s)
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


def watched(plan: SoakPlan) -> SoakReport:
    """Run it and show how it goes."""
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

        def tell(rooms: int, how: str) -> None:
            nonlocal line_at
            progress.update(task, completed=rooms, description=how)
            if not console.is_terminal and time.monotonic() >= line_at:
                line_at = time.monotonic() + LINE_EVERY_S
                console.print(f"{rooms} of {plan.rooms} rooms: {how}", highlight=False)

        return soak(plan, tell)


if __name__ == "__main__":
    sys.exit(main())
