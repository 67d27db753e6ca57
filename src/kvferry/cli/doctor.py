"""``kvferry doctor``: what this machine has, whether it will do, and what to do about it."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.errors import InputError

EXAMPLE = """example:
  kvferry doctor                                   is this machine fit for shm?
  kvferry doctor --transport nixl --device cuda    ... for NIXL with pools on GPUs?
  kvferry doctor --rendezvous http://10.0.0.1:7077 --key cluster.key
  kvferry doctor --transport nixl --prefill tp=4,page=16 --decode tp=1 \\
      --layers 64 --kv-heads 8 --head-dim 128      ... and do these two fit?

It looks at the machine (clock, open files), at every transport that is installed (each is started
in a process of its own), shared and pinned memory, writing other processes' memory (tried), GPUs,
RDMA devices, the control channel (tried), the cluster key and the rendezvous if they are given,
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
        "--transport", default="shm", metavar="NAME", help="shm (default), nixl, mooncake, ..."
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the pools are (cpu)"
    )
    parser.add_argument("--rendezvous", metavar="URL", help="try to reach this rendezvous")
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster key (what KVFERRY_KEY_FILE names, or none)"
    )
    _add_layouts(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", metavar="SIDE", help="a layout, as in tp=4,page=64")
    parser.add_argument("--decode", metavar="SIDE", help="the other, as in tp=1,page=16")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face config.json or its folder")
    parser.add_argument("--layers", metavar="N", help="layers, where no --model is given")
    parser.add_argument("--kv-heads", metavar="N", help="KV heads of the whole model")
    parser.add_argument("--head-dim", metavar="N", help="elements per head")
    parser.add_argument("--v-head-dim", metavar="N", help="elements per V head where they differ")
    parser.add_argument("--dtype", metavar="T", help="cache dtype (default: the model's, or bf16)")
    parser.add_argument("--state-dtype", metavar="T", help="dtype of recurrent state")
    parser.add_argument("--tokens", default="8192", metavar="N", help="prompt length (8192)")


def run(args: argparse.Namespace) -> int:
    """Look at the machine and print what was found."""
    try:
        # Sockets and transports are large, and the other commands must not wait for them.
        from kvferry.cli import doctor_run  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"a package that kvferry always needs is missing or broken ({error}); "
            f"pip install --force-reinstall kvferry"
        ) from None
    return doctor_run.run(args)
