"""Command ``python -m kvferry.testing.explore [--full]``: explore, and print a line per case."""

from __future__ import annotations

import argparse
import sys

from kvferry.testing.explore.cases import cases


def main() -> int:
    """Explore the selected cases; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.testing.explore", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every model, fault and order")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--max-states", type=int, default=2_000_000, help="limit of each case")
    options = parser.parse_args()
    broken = False
    for case in cases(full=options.full):
        if options.only not in str(case):
            continue
        result = case.run(options.max_states)
        extent = "all" if result.complete else "NOT ALL"
        print(f"{case}: {extent} of {result.states} states, {result.terminals} ends", flush=True)
        if result.violation:
            broken = True
            print(result.violation, flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
