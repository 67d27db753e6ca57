"""``kvferry key``: make a cluster key, or a read-only token from one."""

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
  kvferry key cluster.key                      make the key once
  scp -p cluster.key decode-1:                 copy it to every machine
  kvferry serve discovery --host 0.0.0.0 --key cluster.key
  kvferry key cluster.key --token --days 7     make a token for the status page
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "key",
        help="make a cluster key",
        description="Write a new random cluster key to a file that only you can read. With "
        "--token, make a read-only token for the status page from an existing key.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "file", metavar="FILE", help="the new key file; with --token, an existing one"
    )
    parser.add_argument("--token", action="store_true", help="make a read-only token")
    parser.add_argument("--days", metavar="N", help="days until the token expires (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write a key file and print the key's name, but not the key."""
    # Imported here, so that other commands start without ZeroMQ.
    from kvferry.security.keys import ClusterKey  # noqa: PLC0415

    if args.token:
        return _token(ClusterKey.read(args.file), args)
    if args.days is not None:
        raise InputError("--days is for a token, as a key does not expire; add --token")
    key = ClusterKey.new()
    key.write(args.file)
    if args.json:
        print(msgspec.json.encode({"file": args.file, "name": key.name}).decode())
    else:
        print(f"wrote the cluster key {key.name} to {args.file}; copy it to every machine")
    return 0


def _token(key: ClusterKey, args: argparse.Namespace) -> int:
    """Print a token, only on standard output because it grants access."""
    from kvferry.security.tokens import make_token  # noqa: PLC0415

    days = whole("--days")(args.days) if given("--days", args.days) is not None else TOKEN_DAYS
    if days > MOST_DAYS:
        raise InputError(f"--days must be at most {MOST_DAYS}, not {days}")
    until = time.time() + days * 86400
    token = make_token(key.http, until)
    if args.json:
        print(msgspec.json.encode({"token": token, "until": int(until)}).decode())
    else:
        print(token)
    return 0
