"""Flags of the commands that query a running cluster: its URL and the credentials."""

from __future__ import annotations

import argparse
import os
import time

from kvferry.cli.parsing import given
from kvferry.dashboard.client import StatusClient
from kvferry.errors import InputError

URL = "http://127.0.0.1:8000"
TOKEN_VARIABLE = "KVFERRY_TOKEN"
# Lifetime of a token made for one command.
TOKEN_S = 600.0


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url, --key and --token."""
    parser.add_argument(
        "--url", metavar="URL", help=f"a router or a discovery service (default: {URL})"
    )
    parser.add_argument("--key", metavar="FILE", help="the cluster key, if the cluster has one")
    parser.add_argument(
        "--token", metavar="TOKEN", help=f"a token of `kvferry key --token` (or {TOKEN_VARIABLE})"
    )


def status_client(args: argparse.Namespace) -> StatusClient:
    """Return a client for the flags."""
    return StatusClient(given("--url", args.url) or URL, _token(args))


def _token(args: argparse.Namespace) -> str:
    """Return the given token, one made from the cluster key, or an empty string."""
    from kvferry.security.keys import ClusterKey  # noqa: PLC0415 - imports ZeroMQ
    from kvferry.security.tokens import make_token  # noqa: PLC0415

    token = given("--token", args.token) or os.environ.get(TOKEN_VARIABLE, "")
    file = given("--key", args.key)
    if token and file:
        raise InputError("--token and --key exclude each other; give one of them")
    if token:
        return token
    key = ClusterKey.read(file) if file else ClusterKey.from_environment()
    return make_token(key.http, time.time() + TOKEN_S) if key is not None else ""
