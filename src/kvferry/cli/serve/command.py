"""``kvferry serve``: a whole cluster on this machine, or one part of one, until stopped."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.cli.parsing import Parser
from kvferry.cli.serve.flags import (
    add_flags,
    cluster_of,
    demand_own,
    discovery_of,
    router_of,
    status_of,
    worker_of,
)
from kvferry.errors import InputError, Refused, TransportError

EXAMPLE = """example:
  kvferry serve                                        prefill TP3, decode TP1, router on port 8000
  kvferry serve --prefill tp=3 --decode tp=1,dp=2,page=32 --port 9000
  kvferry serve --config cluster.toml                  the same from a file
  kvferry serve --discovery etcd://127.0.0.1:2379/kvferry

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "What is a ferry?"}]}'

several hosts, each with the same key file (kvferry key cluster.key):
  kvferry serve discovery --host 0.0.0.0 --key cluster.key
  kvferry serve prefill --layout tp=3 --host 10.0.0.2 --discovery http://10.0.0.1:7077 \\
      --transport nixl --key cluster.key
  kvferry serve decode --layout tp=1 --host 10.0.0.3 --discovery http://10.0.0.1:7077 \\
      --transport nixl --key cluster.key
  kvferry serve router --host 0.0.0.0 --discovery http://10.0.0.1:7077 --key cluster.key
"""
MODEL = ("model", "tiny", "transport", "device")
COMMON = ("config", "key", "json", "print-config")
READERS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "discovery": discovery_of,
    "status": status_of,
    "worker": worker_of,
    "router": router_of,
}


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command, its flags, and the parts that it can run alone."""
    parser = commands.add_parser(
        "serve",
        help="run a cluster, or one part of one",
        description="Run a cluster on this machine, with an OpenAI API in front, or one PART of "
        "a cluster. Ctrl-C or SIGTERM stops it.",
        epilog=EXAMPLE,
    )
    routing = "policy", "on-failure", "deadline", "host", "port"
    sides = "prefill", "decode"
    add_flags(parser, "config", "discovery", *MODEL, *sides, *routing, "key", "json")
    add_flags(parser, "print-config")
    parser.set_defaults(run=run_all)
    parts = parser.add_subparsers(
        title="parts", metavar="PART", required=False, parser_class=Parser
    )
    discovery = _part(parts, "discovery", "register and find instances (port 7077)")
    add_flags(discovery, "host", "port", *COMMON)
    discovery.set_defaults(kind="discovery")
    status = _part(parts, "status", "show a cluster whose discovery is etcd (port 7078)")
    add_flags(status, "discovery", "host", "port", "advertise", *COMMON)
    status.set_defaults(kind="status", advertise=None)
    for name, what in (
        ("prefill", "compute prompts and send their cache"),
        ("decode", "receive the cache of prompts and answer"),
    ):
        worker = _part(parts, name, what)
        add_flags(worker, "name", "layout", "discovery", *MODEL)
        add_flags(worker, "host", "port", "advertise", *COMMON)
        worker.set_defaults(kind="worker", part=name, name=None, layout=None)
        worker.set_defaults(advertise=None)
    router = _part(parts, "router", "take requests and pair workers (port 8000)")
    add_flags(
        router,
        "discovery",
        "engine",
        "decode-engine",
        "pull",
        "first-token",
        "max-in-flight",
        *routing,
        *COMMON,
    )
    for name in sides:
        router.add_argument(
            f"--{name}-url",
            action="append",
            metavar="URL",
            help=f"an additional {name} worker; may be repeated; NAME=URL for vLLM and SGLang",
        )
    router.set_defaults(kind="router", prefill_url=None, decode_url=None)
    router.set_defaults(
        engine=None, decode_engine=None, first_token=None, max_in_flight=None, pull=None
    )


def _part(parts: argparse._SubParsersAction[Any], name: str, what: str) -> Parser:
    # Flags may stand before and behind the part's name; without SUPPRESS, the defaults of those
    # behind it would overwrite those before it.
    parser: Parser = parts.add_parser(
        name,
        help=what,
        description=f"Run one {name}: {what}.",
        epilog=EXAMPLE,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run_part)
    return parser


def run_all(args: argparse.Namespace) -> int:
    """Start all parts, print where the API is, and watch over them until a signal comes."""
    cluster = cluster_of(args)
    if args.print_config:
        return _print_config(cluster, args.json)
    from kvferry.reference.cluster.description import check  # noqa: PLC0415
    from kvferry.reference.cluster.launch import ClusterLaunch  # noqa: PLC0415
    from kvferry.reference.models.find import find_model  # noqa: PLC0415
    from kvferry.telemetry.logs.lines import LogSettings, install  # noqa: PLC0415

    def tell_ready(name: str, url: str) -> None:
        if not args.json:
            print(f"{name:12} {url}", flush=True)

    model = find_model(cluster.model)
    check(cluster, model)
    install(LogSettings("serve", "WARNING"))
    with ClusterLaunch() as launch:
        url = launch.start_all(cluster, model, tell_ready)
        parts = {child.name: child.url for child in launch.children}
        text = f"ready: the OpenAI API is at {url}/v1; Ctrl-C stops everything"
        _announce({"url": url, "model": model.name, "parts": parts}, args.json, text)
        asyncio.run(launch.supervise())
    if not args.json:
        print("stopped")
    return 0


def run_part(args: argparse.Namespace) -> int:
    """Run one part until a signal comes."""
    # The web server imports slowly, and other commands do not use it.
    from kvferry.reference.cluster import launch  # noqa: PLC0415

    demand_own(args)
    options = READERS[args.kind](args)
    if args.print_config:
        return _print_config(options, args.json)
    name = str(getattr(options, "name", args.kind))

    def tell_ready(url: str) -> None:
        _announce({"url": url}, args.json, f"{name} on {url}")

    try:
        launch.run_part(name, options, "INFO", tell_ready)
    except (Refused, TransportError) as error:
        raise InputError(str(error)) from None
    return 0


def _print_config(options: msgspec.Struct, as_json: bool) -> int:
    document = msgspec.json.encode(options)
    print((document if as_json else msgspec.json.format(document)).decode())
    return 0


def _announce(document: dict[str, Any], as_json: bool, text: str) -> None:
    # The process that started this one waits for this line.
    print(msgspec.json.encode(document).decode() if as_json else text, flush=True)
