"""The flags of ``kvferry bench``: transfers, the control channel, and endpoints under load."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from kvferry.cli.serve.flags import DECODE, PREFILL, add_model
from kvferry.cli.serve.flags import add_flags as add_cluster_flags
from kvferry.cli.sides import add_flags
from kvferry.endpoint.config import ProofMode
from kvferry.plan import TransferMode
from kvferry.testing.faulty_transport import ContentFault

TRANSFER_EXAMPLE = """example:
  kvferry bench transfer --transport nixl --prefill tp=1,page=16 --decode tp=2,page=16 \\
      --layers 16 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 4096 --mode auto --json
  kvferry bench transfer --prefill tp=4 --decode tp=1 --inject swap-layers

One process per rank, every byte verified. Pages are in random order unless `--pages contiguous`
makes them consecutive on both sides. `memcpy_seconds` is a plain copy of the same number of bytes
in the same run: the limit of this machine's memory.

exit status: 0 if every byte was right, 1 if not, or after --inject, 2 bad input.
"""

CONTROL_EXAMPLE = """example:
  kvferry bench control --transport shm --concurrency 1,8,64 --json
  kvferry bench control --device cuda

Rooms of one page, timed from the target's request to its end, with all messages, in two processes.
"""

SERVE_EXAMPLE = """example:
  kvferry bench serve --url http://127.0.0.1:8000 --concurrency 1,2,4,8,16 \\
      --input-tokens 256 --output-tokens 32 --plot sweep.png

Any endpoint with OpenAI's API. A closed loop keeps this number of requests in flight. Prompts are
random token ids if the endpoint takes them, and no two begin alike, so that no prefix cache helps.
TTFT is the time to the first token, TPOT the time of each later one.

exit status: 0 if every request was answered, 1 if one failed, 2 bad input.
"""

COMPARE_EXAMPLE = """example:
  kvferry bench compare --plot compare.png
  kvferry bench compare --prefill tp=1 --decode tp=3 --transport nixl --json

Starts three clusters on this machine, one after the other: both sides with decode's layout, then
the given prefill by slices, then staged. Over shm there is nothing to stage, so there are two.

exit status: 0 if every request was answered, 1 if one failed, 2 bad input.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure transfers and endpoints",
        description="Measure real transfers between real processes, or an endpoint under load.",
    )
    kinds = parser.add_subparsers(
        title="what to measure", metavar="WHAT", required=True, parser_class=type(parser)
    )
    _add_transfer(kinds)
    _add_control(kinds)
    _add_serve(kinds)
    _add_compare(kinds)


def _add_transfer(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "transfer",
        help="one request's cache between two layouts",
        description="Carry one request's cache from one layout to another and time it.",
        epilog=TRANSFER_EXAMPLE,
    )
    add, modes = parser.add_argument, ["auto", *map(str, TransferMode)]
    add_flags(parser, required=True, tokens=4096)
    add("--mode", choices=modes, default="auto", help="force a mode")
    orders = ("fragmented", "contiguous")
    add("--pages", choices=orders, default="fragmented", help="order on both sides (fragmented)")
    add("--repeat", default="5", metavar="N", help="timed repetitions (5)")
    add("--chunk", metavar="N", help="tokens in each push (all at once)")
    add("--staging-mib", metavar="N", help="staging memory in MiB (64)")
    add("--slot-mib", metavar="N", help="size of a staging slot in MiB")
    add("--timeline", action="store_true", help="list each step of the last repetition")
    faults = [str(fault) for fault in ContentFault]
    damage = f"damage a transfer, which must end in content-corrupt: {', '.join(faults)}"
    add("--inject", choices=faults, metavar="KIND", help=damage)
    _add_common(parser, "transfer")


def _add_control(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "control",
        help="rooms of one page: latency and rooms per second",
        description="Carry rooms of one page, so that only messages and threads count.",
        epilog=CONTROL_EXAMPLE,
    )
    add = parser.add_argument
    add("--concurrency", default="1,8,64", metavar="LIST", help="rooms in flight (1,8,64)")
    add("--rooms", default="400", metavar="N", help="rooms for each (400)")
    _add_common(parser, "control")


def _add_common(parser: argparse.ArgumentParser, module: str) -> None:
    add = parser.add_argument
    add("--device", default="cpu", help="where the pools are: cpu or cuda")
    transports = "auto (default): the best that works; or shm, cuda, nixl, mooncake, shm,nixl, ..."
    add("--transport", default="auto", metavar="NAME", help=transports)
    modes = [str(mode) for mode in ProofMode]
    add("--proof", choices=modes, help="compare content (sampled; full with --inject)")
    add("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=lambda args: _run(module, args))


def _add_serve(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "serve",
        help="any OpenAI endpoint under load: TTFT, time per token, throughput",
        description="Put load on an endpoint with OpenAI's API and measure its answers.",
        epilog=SERVE_EXAMPLE,
    )
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="as in http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="(the first that the endpoint lists)")
    add("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY, or none)")
    _add_load(parser, "load", concurrency="1,2,4,8,16", tokens=("256", "32"))


def _add_compare(kinds: argparse._SubParsersAction[Any]) -> None:
    parser = kinds.add_parser(
        "compare",
        help="equal TP, different TP by slices, and staged, under the same load",
        description="Serve on this machine in three ways and put the same load on each.",
        epilog=COMPARE_EXAMPLE,
    )
    add = parser.add_argument
    add_model(parser)
    for name, default in (("prefill", PREFILL), ("decode", DECODE)):
        add(f"--{name}", metavar="SIDE", help=f"tp, pp, page, order, dtype ({default})")
    installed = "(the first that is installed: nixl, mooncake, shm)"
    add("--transport", metavar="NAME", help=installed)
    add_cluster_flags(parser, "discovery")
    _add_load(parser, "compare", concurrency="1,2,4", tokens=("128", "16"), requests="8")
    # A cluster description needs these; a comparison has no flags for them.
    parser.set_defaults(host=None, port="0", key=None, policy=None, on_failure=None)


def _add_load(
    parser: argparse.ArgumentParser,
    module: str,
    *,
    concurrency: str,
    tokens: tuple[str, str],
    requests: str | None = None,
) -> None:
    add = parser.add_argument
    levels = f"requests in flight, one level after the other ({concurrency})"
    add("--concurrency", default=concurrency, metavar="LIST", help=levels)
    for name, default in zip(("input", "output"), tokens, strict=True):
        add(f"--{name}-tokens", default=default, metavar="N", help=f"of each request ({default})")
    count = requests or "4 times the concurrency, at least 8"
    add("--requests", default=requests, metavar="N", help=f"for each level ({count})")
    add("--seed", metavar="N", help="of the prompts (another in each run)")
    add("--deadline", default="300", metavar="S", help="seconds for a request (300)")
    add("--plot", metavar="FILE", help="draw a figure: .png, .svg or .pdf")
    add("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=lambda args: _run(module, args))


def _run(module: str, args: argparse.Namespace) -> int:
    # Endpoints and transports import slowly, and other commands do not need them.
    status: int = import_module(f"kvferry.cli.bench.{module}").run(args)
    return status
