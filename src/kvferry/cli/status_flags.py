"""Flags of the commands that query a running cluster: its URL and the credentials."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import TYPE_CHECKING

from kvferry.cli.parsing import given
from kvferry.dashboard.client import StatusClient
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.security.keys import ClusterKey

URL = "http://127.0.0.1:8000"
TOKEN_VARIABLE = "KVFERRY_TOKEN"
# Lifetime of a token made for one command.
TOKEN_S = 600.0


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url, --discovery, --key and --token."""
    parser.add_argument(
        "--url", metavar="URL", help=f"a router or a discovery service (default: {URL})"
    )
    parser.add_argument(
        "--discovery", metavar="URL", help="find the page by this discovery service instead"
    )
    parser.add_argument("--key", metavar="FILE", help="the cluster key, if the cluster has one")
    parser.add_argument(
        "--token", metavar="TOKEN", help=f"a token of `kvferry key --token` (or {TOKEN_VARIABLE})"
    )


def status_client(args: argparse.Namespace) -> StatusClient:
    """Return a client for the flags."""
    url, discovery = given("--url", args.url), given("--discovery", args.discovery)
    if url and discovery:
        raise InputError("--url and --discovery exclude each other; give one of them")
    token = given("--token", args.token) or os.environ.get(TOKEN_VARIABLE, "")
    if token and given("--key", args.key):
        raise InputError("--token and --key exclude each other; give one of them")
    key = _key(args)
    if discovery:
        url = asyncio.run(_find_status(discovery, key))
    return StatusClient(url or URL, token or _own_token(key))


async def _find_status(url: str, key: ClusterKey | None) -> str:
    """Return the URL of the page that a discovery service has or knows."""
    from kvferry.discovery.client import discovery_at  # noqa: PLC0415 - imports the web client
    from kvferry.discovery.status_page import find_status_url  # noqa: PLC0415

    discovery = discovery_at(url, key)
    try:
        return await find_status_url(discovery)
    finally:
        await discovery.close()


def _key(args: argparse.Namespace) -> ClusterKey | None:
    from kvferry.security.keys import ClusterKey  # noqa: PLC0415 - imports ZeroMQ

    file = given("--key", args.key)
    return ClusterKey.read(file) if file else ClusterKey.from_environment()


def _own_token(key: ClusterKey | None) -> str:
    """Return a token for this command; empty without a key."""
    from kvferry.security.tokens import make_token  # noqa: PLC0415 - imports ZeroMQ

    return make_token(key.http, time.time() + TOKEN_S) if key is not None else ""
