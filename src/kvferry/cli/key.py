"""``kvferry key``: make the file by which the parties of a cluster know each other."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

EXAMPLE = """example:
  kvferry key cluster.key                      make it once
  scp -p cluster.key decode-1:                 give it to every machine
  kvferry serve rendezvous --host 0.0.0.0 --key cluster.key
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "key",
        help="make a cluster key",
        description="Write a new random cluster key to a file that only you can read.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="where to write it; never overwritten")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say which key it is, without showing it."""
    # Only this command and the servers need sockets.
    from kvferry.runtime.keys import ClusterKey  # noqa: PLC0415

    key = ClusterKey.new()
    key.write(args.file)
    if args.json:
        print(msgspec.json.encode({"file": args.file, "name": key.name}).decode())
    else:
        print(f"wrote the cluster key {key.name} to {args.file}; give it to every party")
    return 0
