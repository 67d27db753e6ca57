"""``kvferry bench``: measure transfers and the control path on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli.sides import add_flags
from kvferry.errors import InputError, TransportError
from kvferry.plan import Path

TRANSFER_EXAMPLE = """example:
  kvferry bench transfer --transport nixl --prefill tp=1,page=16 --decode tp=2,page=16 \\
      --layers 16 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 4096 --path auto --json

One process per rank, fragmented pages, every byte verified. `memcpy_seconds` is a plain copy of
as many bytes, in the same run: the ceiling of what this machine's memory can do.
"""

CONTROL_EXAMPLE = """example:
  kvferry bench control --transport shm --concurrency 1,8,64 --json

Rooms of one page, from the target's request to its end, with all messages and both processes.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure transfers on this machine",
        description="Measure real transfers between real processes on this machine.",
    )
    kinds = parser.add_subparsers(
        title="what to measure", metavar="WHAT", required=True, parser_class=type(parser)
    )
    _add_transfer(kinds)
    _add_control(kinds)


def _add_transfer(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "transfer",
        help="one request's cache between two layouts",
        description="Carry one request's cache from one layout to another and time it.",
        epilog=TRANSFER_EXAMPLE,
    )
    add_flags(parser, required=True, tokens=4096)
    parser.add_argument(
        "--path", choices=["auto", *(p.value for p in Path)], default="auto", help="force a path"
    )
    parser.add_argument("--repeat", default="5", metavar="N", help="timed repetitions (5)")
    parser.add_argument("--chunk", metavar="N", help="tokens in each push (all at once)")
    parser.add_argument("--staging-mib", metavar="N", help="staging memory in MiB (64)")
    parser.add_argument("--slot-mib", metavar="N", help="size of a staging slot in MiB")
    parser.add_argument("--device", default="cpu", help="where the pools are: cpu or cuda")
    _add_common(parser, run_transfer)


def _add_control(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "control",
        help="rooms of one page: latency and rooms per second",
        description="Carry rooms of one page, so that only messages and threads count.",
        epilog=CONTROL_EXAMPLE,
    )
    parser.add_argument(
        "--concurrency", default="1,8,64", metavar="LIST", help="rooms at once (1,8,64)"
    )
    parser.add_argument("--rooms", default="400", metavar="N", help="rooms for each (400)")
    _add_common(parser, run_control)


def _add_common(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument(
        "--transport", default="shm", metavar="NAME", help="shm (default), nixl, mooncake, ..."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run_transfer(args: argparse.Namespace) -> int:
    """Measure a transfer."""
    # Endpoints and transports are large, and the other commands must not wait for them.
    from kvferry.cli import bench_transfer  # noqa: PLC0415

    return bench_transfer.run(args)


def run_control(args: argparse.Namespace) -> int:
    """Measure the control path."""
    from kvferry.cli import bench_control  # noqa: PLC0415

    return bench_control.run(args)


def demand_transport(name: str) -> None:
    """Refuse a transport that is not there before any process is started for it."""
    from kvferry.transport.registry import transport_class  # noqa: PLC0415

    try:
        transport_class(name)
    except TransportError as error:
        raise InputError(str(error)) from None
