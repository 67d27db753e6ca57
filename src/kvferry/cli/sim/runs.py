"""Runs of ``kvferry sim``, their progress and their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from kvferry.cli.parsing import whole
from kvferry.errors import InputError
from kvferry.testing.sim import BREAKS, SCENARIOS, SimResult, run_scenario, run_seed

T = TypeVar("T")

EXIT_VIOLATION = 1

# Seeds of each scenario if none is named.
SCENARIO_SEEDS = 2


def run(args: argparse.Namespace) -> int:
    """Run what the arguments ask for, and print the result."""
    if args.list:
        return _list(as_json=args.json)
    if args.scenario and args.broken:
        raise InputError("--scenario and --break don't go together; give one of them")
    first = whole("--first-seed", least=0)(args.first_seed)

    def seeds(default: str) -> range:
        return range(first, first + whole("--seeds")(args.seeds or default))

    if args.broken:
        _check_name(args.broken, BREAKS, "--break")
        return _hunt(args.broken, seeds("1000"), as_json=args.json)
    if args.scenario:
        _check_name(args.scenario, SCENARIOS, "--scenario")
        return _run([(args.scenario, seed) for seed in seeds("20")], [], as_json=args.json)
    scenarios = [(name, seed) for name in SCENARIOS for seed in range(SCENARIO_SEEDS)]
    return _run(scenarios, seeds("200"), as_json=args.json)


def _check_name(name: str, known: Iterable[str], flag: str) -> None:
    if name not in known:
        raise InputError(f"{flag} {name!r} is not known; see kvferry sim --list")


def _run(scenarios: list[tuple[str, int]], seeds: Sequence[int], *, as_json: bool) -> int:
    total = SimResult()
    verdicts: dict[str, str] = {}
    for name, seed in _with_progress(scenarios, "scenarios"):
        result = run_scenario(name, seed)
        passed = not result.violations and verdicts.get(name) != "fail"
        verdicts[name] = "pass" if passed else "fail"
        result.violations = [(s, f"scenario {name}: {text}") for s, text in result.violations]
        result.seeds = 0 if seeds else 1
        total.add(result)
    for seed in _with_progress(seeds, "seeds"):
        total.add(run_seed(seed))
    if as_json:
        _print_json(_document(total) | {"scenarios": verdicts})
    else:
        _print_result(total, verdicts)
    return EXIT_VIOLATION if total.violations else 0


def _hunt(name: str, seeds: range, *, as_json: bool) -> int:
    total, broken = SimResult(), BREAKS[name]
    for seed in _with_progress(seeds, "seeds"):
        total.add(run_seed(seed, broken.machines, broken.faults))
        if total.violations:
            break
    caught = bool(total.violations)
    if as_json:
        after = total.seeds if caught else None
        found = {"scenarios": {}, "break": name, "caught": caught, "after_seeds": after}
        _print_json(_document(total) | found)
    elif caught:
        print(f"{name} ({broken.title}): caught after {_plural(total.seeds, 'seed')}")
        print(total.violations[0][1].partition("\n")[0])
    else:
        print(f"{name} ({broken.title}): NOT caught in {len(seeds)} seeds")
    return 0 if caught else EXIT_VIOLATION


def _with_progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Return the items, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return items
    return track(items, what, console=Console(stderr=True), transient=True)


def _document(total: SimResult) -> dict[str, Any]:
    violations = [{"seed": seed, "text": text} for seed, text in total.violations]
    document: dict[str, Any] = msgspec.to_builtins(total, order="deterministic")
    return document | {"violations": violations}


def _print_json(document: dict[str, Any]) -> None:
    print(msgspec.json.encode(document).decode())


def _print_result(total: SimResult, verdicts: dict[str, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    failed = " ".join(name for name, verdict in verdicts.items() if verdict == "fail")
    counts = ((len(verdicts), "scenario"), (total.seeds, "seed"), (total.rooms, "room"))
    ran = ", ".join(_plural(count, what) for count, what in counts)
    ended = f"{total.done} done, {total.rooms - total.done} failed with a reason"
    console.print(f"{ran} ({ended}), {_plural(total.steps, 'step')}")
    if total.faults:
        faults = (f"{name} {count}" for name, count in total.faults.most_common())
        console.print(f"faults: {', '.join(faults)}", style="dim")
    if not total.violations:
        console.print("[bold green]every promise held[/]")
        return
    console.print(f"[bold red]{_plural(len(total.violations), 'violation')}[/] {failed}")
    for _, text in total.violations[:3]:
        console.print(escape(text))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _list(*, as_json: bool) -> int:
    scenarios = {name: scenario.title for name, scenario in SCENARIOS.items()}
    breaks = {name: broken.title for name, broken in BREAKS.items()}
    if as_json:
        _print_json({"scenarios": scenarios, "breaks": breaks})
    else:
        lines = (f"  {name:32} {title}" for name, title in (scenarios | breaks).items())
        print("scenarios", *islice(lines, len(scenarios)), "broken rules", *lines, sep="\n")
    return 0
