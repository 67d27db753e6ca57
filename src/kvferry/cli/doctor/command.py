"""``kvferry doctor``: what this machine has, whether it will do, and what to do about it."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli import sides
from kvferry.errors import InputError

EXAMPLE = """example:
  kvferry doctor                                   is this machine fit for shm?
  kvferry doctor --transport nixl --device cuda    ... for NIXL with pools on GPUs?
  kvferry doctor --discovery http://10.0.0.1:7077 --key cluster.key
  kvferry doctor --transport nixl --prefill tp=4,page=16 --decode tp=1 \\
      --layers 64 --kv-heads 8 --head-dim 128      ... and do these two fit?

It looks at the machine (clock, open files), at every transport that is installed (each is started
in a process of its own), shared and pinned memory, writing other processes' memory (tried), GPUs,
RDMA devices, the control channel (tried), the cluster key and discovery if they are given,
and the copy loop (compiled and timed). With --prefill and --decode also at the plan between them.

Marks: ok; note (worth knowing, or in the way of something that was not asked for); problem (what
was asked for can't work). Every note and problem says what to do.

Exit status: 0 without a problem, 1 with one, 2 for bad input. With --json the last line is
{"checks": [{"area", "name", "state", "detail", "remedy"}, ...], "ok": true or false}.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "doctor",
        help="tell what this machine has and what it lacks",
        description="Tell what this machine has, whether it will do, and what to do if not.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--transport",
        default="auto",
        metavar="NAME",
        help="auto (default): what works; or shm, cuda, nixl, mooncake, several as in shm,nixl",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the pools are (cpu)"
    )
    parser.add_argument("--discovery", metavar="URL", help="try to reach this discovery service")
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster key (what KVFERRY_KEY_FILE names, or none)"
    )
    sides.add_flags(parser, required=False, tokens=8192)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at the machine and print what was found."""
    try:
        # Sockets and transports are large, and the other commands must not wait for them.
        from kvferry.cli.doctor import run as doctor_run  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"a package that kvferry always needs is missing or broken ({error}); "
            f"pip install --force-reinstall kvferry"
        ) from None
    return doctor_run.run(args)
