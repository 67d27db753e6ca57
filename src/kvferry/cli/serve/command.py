"""``kvferry serve``: a whole cluster on this machine, or one part of one, until told to stop."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from kvferry.cli.parsing import Parser
from kvferry.cli.serve.effective import Build, print_settings, settings
from kvferry.cli.serve.flags import (
    add_cluster_flags,
    add_device,
    add_key_and_json,
    add_listening,
    add_model,
    add_print_config,
    add_routing,
    add_transport,
    cluster_of,
    demand_own,
    discovery_of,
    router_of,
    worker_of,
)
from kvferry.errors import InputError, Refused, TransportError
from kvferry.router.options import EngineName

EXAMPLE = """example:
  kvferry serve                                        prefill TP3, decode TP1, router on port 8000
  kvferry serve --prefill tp=3 --decode tp=1,dp=2,page=32 --port 9000
  kvferry serve --config cluster.toml                  the same from a file

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


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command, its flags, and the parts that it can run alone."""
    parser = commands.add_parser(
        "serve",
        help="run a cluster, or one part of one",
        description="Run a cluster on this machine, with an OpenAI API in front, or one PART of "
        "a cluster. Ctrl-C or SIGTERM stops it.",
        epilog=EXAMPLE,
    )
    add_cluster_flags(parser, config=True)
    add_print_config(parser)
    parser.set_defaults(run=run_all)
    parts = parser.add_subparsers(
        title="parts", metavar="PART", required=False, parser_class=Parser
    )
    _add_discovery(parts)
    _add_worker(parts, "prefill", "computes prompts and sends their cache")
    _add_worker(parts, "decode", "receives prompts' cache and answers")
    _add_router(parts)


def _part(parts: argparse._SubParsersAction[Any], name: str, what: str) -> Parser:
    # A flag may stand before the part's name or behind it: what is not given here leaves alone
    # what was given there.
    parser: Parser = parts.add_parser(
        name,
        help=what,
        description=f"Run one {name}: it {what}.",
        epilog=EXAMPLE,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="the cluster's TOML file, for all flags")
    add_print_config(parser)
    return parser


def _add_discovery(parts: argparse._SubParsersAction[Any]) -> None:
    parser = _part(parts, "discovery", "is where instances register and are found")
    add_listening(parser, "7077")
    add_key_and_json(parser)
    parser.set_defaults(run=run_discovery)


def _add_worker(parts: argparse._SubParsersAction[Any], name: str, what: str) -> None:
    parser = _part(parts, name, what)
    parser.add_argument("--name", help=f"unique in the cluster ({name}-0)")
    parser.add_argument("--layout", metavar="SIDE", help="as in tp=3,page=16 (tp=1)")
    parser.add_argument("--discovery", metavar="URL", help="where to register")
    add_model(parser)
    add_transport(parser)
    add_device(parser)
    add_listening(parser, "0")
    parser.add_argument("--advertise", metavar="HOST", help="where others reach it, if not --host")
    add_key_and_json(parser)
    parser.set_defaults(run=run_worker, part=name, name=None, layout=None, discovery=None)
    parser.set_defaults(advertise=None)


def _add_router(parts: argparse._SubParsersAction[Any]) -> None:
    parser = _part(parts, "router", "takes requests and pairs workers")
    parser.add_argument("--discovery", metavar="URL", help="where to find workers")
    for name in ("prefill", "decode"):
        parser.add_argument(
            f"--{name}-url",
            action="append",
            metavar="URL",
            help=f"a {name} worker, in addition; may be repeated; NAME=URL for vLLM and SGLang",
        )
    parser.add_argument(
        "--engine", choices=list(map(str, EngineName)), help="what the workers run (kvferry)"
    )
    add_routing(parser)
    add_listening(parser, "8000")
    add_key_and_json(parser)
    parser.set_defaults(run=run_router, discovery=None, prefill_url=None, decode_url=None)
    parser.set_defaults(engine=None)


# ---------------------------------------------------------------- everything here


def run_all(args: argparse.Namespace) -> int:
    """Start all parts, say where the API is, and watch over them until a signal comes."""
    if args.print_config:
        return _print_config(args, lambda args: msgspec.to_builtins(cluster_of(args)))
    from kvferry.reference.cluster.description import check  # noqa: PLC0415
    from kvferry.reference.cluster.launch import ClusterLaunch  # noqa: PLC0415
    from kvferry.reference.cluster.parts import stop_signals  # noqa: PLC0415
    from kvferry.reference.models.find import find_model  # noqa: PLC0415

    cluster = cluster_of(args)
    model = find_model(cluster.model)
    check(cluster, model)
    _log("serve", "WARNING")
    with ClusterLaunch() as launch:
        tell = _silent if args.json else _tell_ready
        url = launch.start_all(cluster, model, tell)
        parts = {child.name: child.url for child in launch.children}
        _announce({"url": url, "model": model.name, "parts": parts}, args.json, _welcome(url))
        with stop_signals() as told:
            launch.supervise(told)
    if not args.json:
        print("stopped")
    return 0


def _print_config(args: argparse.Namespace, build: Build) -> int:
    """Of a part with a file, that of the whole cluster, which the file describes."""
    if getattr(args, "config", None):
        build = _whole_file
    print_settings(settings(args, build), as_json=args.json)
    return 0


def _whole_file(args: argparse.Namespace) -> dict[str, Any]:
    from kvferry.reference.cluster.description import read_cluster  # noqa: PLC0415

    whole: dict[str, Any] = msgspec.to_builtins(read_cluster(args.config))
    return whole


def _tell_ready(name: str, url: str) -> None:
    print(f"{name:12} {url}", flush=True)


def _silent(name: str, url: str) -> None:
    """For programs, which read one document."""


def _welcome(url: str) -> str:
    return f"ready: the OpenAI API is at {url}/v1; Ctrl-C stops everything"


# ---------------------------------------------------------------- single parts


def run_discovery(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    demand_own(args, "discovery")
    if args.print_config:
        return _print_config(args, discovery_of)
    return _run_part("discovery", discovery_of(args), "discovery", args.json)


def run_worker(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    demand_own(args, "worker")
    if args.print_config:
        return _print_config(args, worker_of)
    options = worker_of(args)
    return _run_part("worker", options, options["name"], args.json)


def run_router(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    demand_own(args, "router")
    if args.print_config:
        return _print_config(args, router_of)
    return _run_part("router", router_of(args), "router", args.json)


def _run_part(kind: str, options: dict[str, Any], name: str, as_json: bool) -> int:
    # The web server is large, and the other commands must not wait for its import.
    from kvferry.reference.cluster.parts import PartKind, run_part  # noqa: PLC0415

    _log(name, "INFO", 0 if kind == PartKind.WORKER else None)
    try:
        run_part(
            PartKind(kind),
            options,
            lambda url: _announce({"url": url}, as_json, f"{name} on {url}"),
        )
    except (Refused, TransportError) as error:
        raise InputError(str(error)) from None
    return 0


def _log(name: str, level: str, rank: int | None = None) -> None:
    from kvferry.telemetry.logs.lines import LogSettings, install  # noqa: PLC0415

    install(LogSettings(name, level, rank))


def _announce(document: dict[str, Any], as_json: bool, text: str) -> None:
    # Whoever started us waits for this line.
    print(msgspec.json.encode(document).decode() if as_json else text, flush=True)
