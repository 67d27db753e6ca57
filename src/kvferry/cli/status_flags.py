"""Flags of the commands that look at a running cluster: where it is, and what lets one look."""

from __future__ import annotations

import argparse
import os
import time

from kvferry.cli.parsing import given
from kvferry.errors import InputError

URL = "http://127.0.0.1:8000"
TOKEN_VARIABLE = "KVFERRY_TOKEN"
# For one command; the page takes longer ones.
TOKEN_S = 600.0


def add_looking(parser: argparse.ArgumentParser) -> None:
    """Where to look, and with what."""
    parser.add_argument(
        "--url", metavar="URL", help=f"of a router or a discovery service (default: {URL})"
    )
    parser.add_argument("--key", metavar="FILE", help="the cluster key, where there is one")
    parser.add_argument(
        "--token", metavar="TOKEN", help=f"what `kvferry key --token` made (or {TOKEN_VARIABLE})"
    )


def url_of(args: argparse.Namespace) -> str:
    """Where to look."""
    return given("--url", args.url) or URL


def token_of(args: argparse.Namespace) -> str:
    """What lets this command look: a token, or one made from the key for a few minutes."""
    from kvferry.security.keys import ClusterKey  # noqa: PLC0415 - opens ZeroMQ
    from kvferry.security.tokens import make_token  # noqa: PLC0415

    token = given("--token", args.token) or os.environ.get(TOKEN_VARIABLE, "")
    file = given("--key", args.key)
    if token and file:
        raise InputError("--token and --key say the same; give one of them")
    if token:
        return token
    key = ClusterKey.read(file) if file else ClusterKey.from_environment()
    return make_token(key.http, time.time() + TOKEN_S) if key is not None else ""
