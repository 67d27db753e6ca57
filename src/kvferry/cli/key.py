"""``kvferry key``: make the file by which the parties of a cluster know each other."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.cli.parsing import given, whole
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.security.keys import ClusterKey

TOKEN_DAYS, MOST_DAYS = 30, 3650

EXAMPLE = """example:
  kvferry key cluster.key                      make it once
  scp -p cluster.key decode-1:                 give it to every machine
  kvferry serve discovery --host 0.0.0.0 --key cluster.key
  kvferry key cluster.key --token --days 7     a token that lets somebody look at the page
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "key",
        help="make a cluster key",
        description="Write a new random cluster key to a file that only you can read; or, with "
        "--token, make a token from a key that is there, which lets its bearer look and no more.",
        epilog=EXAMPLE,
    )
    parser.add_argument("file", metavar="FILE", help="where to write it; never overwritten")
    parser.add_argument("--token", action="store_true", help="make a token to look with")
    parser.add_argument("--days", metavar="N", help="how long it is good (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file and say which key it is, without showing it."""
    # Only this command and the servers need sockets.
    from kvferry.security.keys import ClusterKey  # noqa: PLC0415

    if args.token:
        return _token(ClusterKey.read(args.file), args)
    if args.days is not None:
        raise InputError("--days is for a token; a key is good for ever. Add --token or drop it")
    key = ClusterKey.new()
    key.write(args.file)
    if args.json:
        print(msgspec.json.encode({"file": args.file, "name": key.name}).decode())
    else:
        print(f"wrote the cluster key {key.name} to {args.file}; give it to every party")
    return 0


def _token(key: ClusterKey, args: argparse.Namespace) -> int:
    """Print a token. Whoever sees it can look, so it goes to standard output alone."""
    from kvferry.security.tokens import make_token  # noqa: PLC0415

    days = whole("--days")(args.days) if given("--days", args.days) is not None else TOKEN_DAYS
    if days > MOST_DAYS:
        raise InputError(f"--days goes up to {MOST_DAYS}, not {days}")
    until = time.time() + days * 86400
    token = make_token(key.http, until)
    if args.json:
        print(msgspec.json.encode({"token": token, "until": int(until)}).decode())
    else:
        print(token)
    return 0
