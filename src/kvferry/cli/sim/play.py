"""The play of ``kvferry sim``: worlds, their progress, what was found."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.cli.parsing import whole
from kvferry.errors import InputError
from kvferry.testing.sim import BREAKS, SCENARIOS, SimResult, run_scenario, run_seed

T = TypeVar("T")

EXIT_VIOLATION = 1

# Each scenario is played with so many seeds where not told otherwise.
SCENARIO_SEEDS = 2


def run(args: argparse.Namespace) -> int:
    """Play, and print what was found."""
    if args.list:
        return _list(as_json=args.json)
    if args.scenario and args.broken:
        raise InputError("--scenario and --break don't go together; give one of them")
    first = whole("--first-seed", least=0)(args.first_seed)
    if args.broken:
        _demand(args.broken, BREAKS, "--break")
        count = whole("--seeds")(args.seeds or "1000")
        return _hunt(args.broken, range(first, first + count), as_json=args.json)
    if args.scenario:
        _demand(args.scenario, SCENARIOS, "--scenario")
        count = whole("--seeds")(args.seeds or "20")
        plays = [(args.scenario, seed) for seed in range(first, first + count)]
        return _play(plays, [], as_json=args.json)
    count = whole("--seeds")(args.seeds or "200")
    plays = [(name, seed) for name in SCENARIOS for seed in range(SCENARIO_SEEDS)]
    return _play(plays, range(first, first + count), as_json=args.json)


def _demand(name: str, known: Iterable[str], flag: str) -> None:
    if name not in known:
        raise InputError(f"{flag} {name!r} is not known; see kvferry sim --list")


# ---------------------------------------------------------------- playing


def _play(plays: list[tuple[str, int]], seeds: Iterable[int], *, as_json: bool) -> int:
    total = SimResult()
    scenarios: dict[str, str] = {}
    for name, seed in _with_progress(plays, "scenarios"):
        result = run_scenario(name, seed)
        passed = not result.violations and scenarios.get(name) != "fail"
        scenarios[name] = "pass" if passed else "fail"
        result.violations = [(s, f"scenario {name}: {text}") for s, text in result.violations]
        result.seeds = 0 if seeds else 1
        total.add(result)
    for seed in _with_progress(list(seeds), "seeds"):
        total.add(run_seed(seed))
    if as_json:
        _print_json(_document(total) | {"scenarios": scenarios})
    else:
        _print_result(total, scenarios)
    return EXIT_VIOLATION if total.violations else 0


def _hunt(name: str, seeds: range, *, as_json: bool) -> int:
    total, caught_after = SimResult(), None
    for seed in _with_progress(seeds, "seeds"):
        total.add(run_seed(seed, BREAKS[name].machines, BREAKS[name].faults))
        if total.violations:
            caught_after = total.seeds
            break
    caught = caught_after is not None
    if as_json:
        document = _document(total) | {"scenarios": {}}
        _print_json(document | {"break": name, "caught": caught, "after_seeds": caught_after})
    elif caught_after is not None:
        print(f"{name} ({BREAKS[name].title}): caught after {_plural(caught_after, 'seed')}")
        print(_headline(total.violations[0][1]))
    else:
        print(f"{name} ({BREAKS[name].title}): NOT caught in {len(seeds)} seeds")
    return 0 if caught else EXIT_VIOLATION


def _with_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, with a bar on a terminal."""
    listed = list(items)
    if not sys.stderr.isatty() or not listed:
        yield from listed
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(listed)


# ---------------------------------------------------------------- printing


def _document(total: SimResult) -> dict[str, Any]:
    return {
        "seeds": total.seeds,
        "rooms": total.rooms,
        "done": total.done,
        "steps": total.steps,
        "faults": dict(sorted(total.faults.items())),
        "violations": [{"seed": seed, "text": text} for seed, text in total.violations],
    }


def _print_json(document: dict[str, Any]) -> None:
    print(msgspec.json.encode(document).decode())


def _print_result(total: SimResult, scenarios: dict[str, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    failed = [name for name, verdict in scenarios.items() if verdict == "fail"]
    counts = ((len(scenarios), "scenario"), (total.seeds, "seed"), (total.rooms, "room"))
    played = ", ".join(_plural(count, what) for count, what in counts)
    ended = f"{total.done} done, {total.rooms - total.done} failed with a reason"
    console.print(f"{played} ({ended}), {_plural(total.steps, 'step')}")
    if total.faults:
        faults = (f"{name} {count}" for name, count in Counter(total.faults).most_common())
        console.print(f"faults: {', '.join(faults)}", style="dim")
    if not total.violations:
        console.print("[bold green]every promise held[/]")
        return
    console.print(f"[bold red]{len(total.violations)} violations[/] {' '.join(failed)}")
    for _, text in total.violations[:3]:
        console.print(escape(text))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _headline(text: str) -> str:
    return text.partition("\n")[0]


def _list(*, as_json: bool) -> int:
    scenarios = {name: scenario.title for name, scenario in SCENARIOS.items()}
    breaks = {name: broken.title for name, broken in BREAKS.items()}
    if as_json:
        _print_json({"scenarios": scenarios, "breaks": breaks})
        return 0
    for heading, rows in (("scenarios", scenarios), ("broken rules", breaks)):
        print(heading)
        for name, title in rows.items():
            print(f"  {name:24} {title}")
    return 0
