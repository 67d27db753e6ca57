"""``kvferry sim``: play the protocol through faults, and say whether its promises held."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLE = """example:
  kvferry sim --seeds 2000               every scenario, and 2000 random worlds
  kvferry sim --scenario C7 --seeds 50   one scenario, 50 times
  kvferry sim --break release-at-abort   show that a broken rule is noticed
  kvferry sim --seeds 1 --first-seed 88  play one seed again
  kvferry sim --list                     the scenarios and the broken rules
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "sim",
        help="play the protocol through faults in simulated time",
        description="Play the real protocol machines through faults, in simulated time.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--seeds", metavar="N", help="how many worlds to play (200)")
    parser.add_argument("--first-seed", default="0", metavar="N", help="where to begin (0)")
    parser.add_argument("--scenario", metavar="ID", help="play one named situation")
    parser.add_argument(
        "--break", dest="broken", metavar="NAME", help="break a rule and see whether it shows"
    )
    parser.add_argument("--list", action="store_true", help="list scenarios and broken rules")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play, and print what was found."""
    # The simulator is large, and the other commands must not wait for its import.
    from kvferry.cli.sim import play as sim_play  # noqa: PLC0415

    return sim_play.run(args)
