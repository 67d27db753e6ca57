"""``kvferry doctor``: its flags, the order of its checks, and its output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli import sides
from kvferry.cli.doctor import Area, Check, DoctorRequest, Finding, State, run_check
from kvferry.cli.parsing import given
from kvferry.errors import InputError, Reason

if TYPE_CHECKING:
    from kvferry.cli.doctor.cluster import Pairing

EXIT_PROBLEM = 1
MARKS = {
    State.OK: "[green]ok[/]",
    State.NOTE: "[yellow]note[/]",
    State.PROBLEM: "[bold red]problem[/]",
}
EXAMPLE = """example:
  kvferry doctor                                   is this machine fit for shm?
  kvferry doctor --transport nixl --device cuda    ... for NIXL with pools on GPUs?
  kvferry doctor --discovery http://10.0.0.1:7077 --key cluster.key
  kvferry doctor --discovery etcd://10.0.0.1:2379/kvferry
  kvferry doctor --transport nixl --prefill tp=4,page=16 --decode tp=1 \\
      --layers 64 --kv-heads 8 --head-dim 128      ... and do these two layouts fit?

Checks the limit of open files, every installed transport (started in a process of its
own), shared and pinned memory, writes into other processes' memory, GPUs, RDMA devices, the
control channel, the cluster key, the discovery service (if given), and the speed of the copy loop.
With --prefill and --decode it also checks the plan between the two layouts.

Marks: ok; note (worth knowing, or a problem for something that was not asked for); problem (what
was asked for cannot work). Every note and every problem has a remedy.

Exit status: 0 without a problem, 1 with one, 2 for bad input. With --json the last line is
{"checks": [{"area", "name", "state", "detail", "remedy"}, ...], "ok": true or false}.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and say how to fix it",
        description="Check what this machine has, whether it suffices, and what to do if not.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--transport",
        default="auto",
        metavar="NAME",
        help="auto (default): any that works; shm, cuda, nixl, mooncake; or several: shm,nixl",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the pools are (cpu)"
    )
    parser.add_argument("--discovery", metavar="URL", help="try to reach this discovery service")
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster key (default: $KVFERRY_KEY_FILE, or none)"
    )
    sides.add_flags(parser, required=False, tokens=8192)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the findings."""
    try:
        # Sockets and transports import slowly, and other commands do not need them.
        from kvferry.cli.doctor.cluster import read_pairing  # noqa: PLC0415
        from kvferry.discovery.address import check_discovery_url  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"a package that kvferry needs is missing or broken ({error}); "
            f"pip install --force-reinstall kvferry"
        ) from None
    request = DoctorRequest(
        transport=args.transport,
        device=args.device,
        discovery=given("--discovery", args.discovery),
        key_file=given("--key", args.key),
    )
    if request.discovery is not None:
        check_discovery_url(request.discovery)
    pairing = read_pairing(args, request)
    with Console(stderr=True, quiet=args.json).status("checking this machine"):
        findings = examine(request, pairing)
    if args.json:
        document = {"checks": findings, "ok": not num_problems(findings)}
        print(msgspec.json.encode(document).decode())
    else:
        print_findings(request, findings)
    return EXIT_PROBLEM if num_problems(findings) else 0


def examine(request: DoctorRequest, pairing: Pairing | tuple[Reason, ...] | None) -> list[Finding]:
    """Run every check. Raises ``InputError`` for an unknown transport."""
    from kvferry.cli.doctor import cluster, devices, host  # noqa: PLC0415
    from kvferry.cli.doctor.probes import run_probe  # noqa: PLC0415

    names = devices.installed_transports(request)
    fit = pairing if isinstance(pairing, cluster.Pairing) else None
    num_peers, request_bytes = (fit.num_peers, fit.costs.num_bytes) if fit else (None, None)
    ports = devices.rdma_ports()
    # The slow probes run in child processes while the other checks go on.
    with ThreadPoolExecutor(len(names) + 1) as pool:
        started = devices.start_transports(request, names, pool)
        gpus = pool.submit(run_probe, "gpus", limit_s=devices.GPU_LIMIT_S)
        checks: list[tuple[Area, str, Check]] = [
            (host.MACHINE, "system", host.check_system),
            (host.MACHINE, "files", lambda: host.check_files(num_peers)),
            (devices.TRANSPORTS, "start", lambda: devices.check_transports(request, started)),
            (host.MEMORY, "shared memory", lambda: host.check_shm(request, request_bytes)),
            (host.MEMORY, "pinned memory", lambda: host.check_pinned(request, bool(ports))),
            (host.MEMORY, "huge pages", host.check_huge_pages),
            (host.MEMORY, "leftovers", host.check_leftovers),
            (host.CMA, host.CMA_NAME, host.check_cma),
            (devices.GPUS, "cards", lambda: devices.check_gpus(request, gpus, bool(ports))),
            (devices.RDMA, "devices", lambda: devices.check_rdma(ports)),
            (devices.RDMA, devices.VERBS, lambda: devices.check_verbs_library(request)),
            (cluster.CONTROL, "channel", lambda: cluster.check_channel(request)),
            (cluster.CONTROL, "cluster", lambda: cluster.check_cluster(request)),
            # After the probes, which would compete for memory bandwidth.
            (host.COPIES, "loop", lambda: host.check_copy_loop(request)),
            (cluster.LAYOUTS, "plan", lambda: cluster.check_layouts(pairing)),
        ]
        return [finding for check in checks for finding in run_check(*check)]


def num_problems(findings: Sequence[Finding]) -> int:
    """Return the number of findings that prevent the request."""
    return sum(finding.state is State.PROBLEM for finding in findings)


def print_findings(request: DoctorRequest, findings: Sequence[Finding]) -> None:
    """Print a table for each area, and a verdict."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for area, members in groupby(findings, key=lambda finding: finding.area):
        console.print(f"[bold]{escape(area)}[/]")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 1))
        table.add_column(width=7)
        table.add_column(min_width=16)
        table.add_column(overflow="fold")
        for one in members:
            remedy = f"\n[bold]→ {escape(one.remedy)}[/]" if one.remedy else ""
            table.add_row(MARKS[one.state], escape(one.name), escape(one.detail) + remedy)
        console.print(table)
    what = f"{request.transport}{'' if request.on_host else ' on ' + request.device}"
    count = num_problems(findings)
    if count:
        problems = "1 problem prevents" if count == 1 else f"{count} problems prevent"
        verdict = f"\n[bold red]{problems} the use of {escape(what)}.[/]"
    else:
        verdict = f"\n[bold green]No problem prevents the use of {escape(what)}.[/]"
    console.print(verdict, soft_wrap=True)
