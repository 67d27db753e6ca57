"""The command line: ``pack`` and ``run``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gpu_engines.machine import DeviceKind
from gpu_engines.packing.contents import CONTENTS, ROOT
from gpu_engines.packing.pack import pack
from gpu_engines.run import Options, names_of, run

PAYLOADS = ROOT / "build" / "gpu-engines"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run it; return the exit status."""
    parser = command_parser()
    asked = parser.parse_args(arguments)
    if asked.command == "pack":
        return max([pack(engine, asked.into) for engine in asked.engines])
    device = DeviceKind(asked.device)
    names = names_of(asked.engine, device)
    if asked.list:
        print("\n".join(names))
        return 0
    if unknown := set(asked.only) - set(names):
        parser.error(f"{asked.engine} has no case {', '.join(sorted(unknown))}; see --list")
    payload = None if asked.installed else asked.payload or PAYLOADS / asked.engine
    out = asked.out or Path(os.environ.get("OUT", PAYLOADS / f"{asked.engine}-results"))
    times = (asked.repeats, asked.budget_s, asked.start_s)
    return run(Options(asked.engine, device, payload, asked.only, out, *times))


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of ``scripts/gpu-engines``."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-engines",
        description="Run real engines with kvferry on a GPU machine that cannot install packages.",
        epilog="Example: scripts/gpu-engines pack vllm; then, on the GPU machine: "
        "scripts/gpu-engines run vllm",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make the payloads of engines from wheels")
    packing.add_argument("engines", nargs="+", choices=list(CONTENTS))
    packing.add_argument("--into", type=Path, default=PAYLOADS, help="default: %(default)s")
    running = commands.add_parser("run", help="run an engine's cases on this machine")
    running.add_argument("engine", choices=list(CONTENTS))
    running.add_argument("--payload", type=Path, help="the engine's folder below --into of pack")
    running.add_argument(
        "--installed", action="store_true", help="use the engine that this Python has installed"
    )
    running.add_argument(
        "--device",
        choices=[kind.value for kind in DeviceKind],
        default=DeviceKind.CUDA.value,
        help="a CPU is for trying the cases: small models, few servers at once",
    )
    running.add_argument("--only", nargs="+", default=[], metavar="CASE", help="these cases only")
    running.add_argument("--list", action="store_true", help="list the cases")
    running.add_argument("--repeats", type=int, default=15, help="of a measurement (default: 15)")
    running.add_argument("--out", type=Path, help="results (default: $OUT, or below build/)")
    running.add_argument(
        "--budget-s", type=int, default=560, help="end after these seconds (default: 560)"
    )
    running.add_argument(
        "--start-s", type=int, default=200, help="time for servers to start (default: 200)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
