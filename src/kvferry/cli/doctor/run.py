"""``kvferry doctor``, once it is known that it was asked for: read, look, print."""

from __future__ import annotations

import argparse

from rich.console import Console

from kvferry.cli.doctor.checks.check import Asked
from kvferry.cli.doctor.checks.examine import examine
from kvferry.cli.doctor.checks.fit import read_pairing
from kvferry.cli.doctor.output import check_succeeded, as_json, print_checks
from kvferry.cli.parsing import given
from kvferry.discovery.http.backend import HttpDiscovery

EXIT_PROBLEM = 1


def run(args: argparse.Namespace) -> int:
    """Read, look, print."""
    asked = Asked(
        transport=args.transport,
        device=args.device,
        discovery=given("--discovery", args.discovery),
        key_file=given("--key", args.key),
    )
    if asked.discovery is not None:
        HttpDiscovery(asked.discovery)  # Refuses what is no address.
    pairing = read_pairing(args, asked)
    with Console(stderr=True, quiet=args.json).status("looking at this machine"):
        checks = examine(asked, pairing)
    if args.json:
        print(as_json(checks))
    else:
        print_checks(asked, checks)
    return 0 if check_succeeded(checks) else EXIT_PROBLEM
