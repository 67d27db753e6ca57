"""Flags of ``kvferry sim``."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLE = """example:
  kvferry sim --seeds 2000               every scenario and 2000 random worlds
  kvferry sim --scenario C7 --seeds 50   one scenario with 50 seeds
  kvferry sim --break release-at-abort   break a rule and see whether it is caught
  kvferry sim --seeds 1 --first-seed 88  repeat one seed
  kvferry sim --list                     list the scenarios and the broken rules
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "sim",
        help="run the protocol with faults in simulated time",
        description="Run the real protocol machines with faults, in simulated time.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--seeds", metavar="N", help="number of random worlds (200)")
    parser.add_argument("--first-seed", default="0", metavar="N", help="the first seed (0)")
    parser.add_argument("--scenario", metavar="ID", help="run one named scenario")
    parser.add_argument(
        "--break", dest="broken", metavar="NAME", help="run until a broken rule is caught"
    )
    parser.add_argument("--list", action="store_true", help="list scenarios and broken rules")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    # The simulator is large: other commands must not import it.
    from kvferry.cli.sim import runs  # noqa: PLC0415

    return runs.run(args)
