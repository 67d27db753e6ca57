"""Run the cases of an engine on this machine, and report them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gpu_engines import mooncake_cases, sglang_cases, sglang_servers, vllm_cases, vllm_servers
from gpu_engines.checklist import (
    Case,
    CaseReport,
    OutOfTime,
    exit_status,
    needed,
    run_cases,
    table,
)
from gpu_engines.machine import DeviceKind, Machine
from gpu_engines.servers import Servers, say

# The end of a server's log that is kept.
_LOG_BYTES = 400_000
# A discovery service or a router loads no model.
START_SMALL_S = 30.0


class Outcome(NamedTuple):
    """How the cases ended, what they measured, and how the servers started."""

    reports: list[CaseReport]
    figures: list[dict[str, Any]]
    servers: dict[str, float | str]


class Options(NamedTuple):
    """The cases to run, where, and for how long at most."""

    engine: str
    device: DeviceKind
    payload: Path | None
    only: Sequence[str]
    out: Path
    repeats: int
    budget_s: int
    start_s: int


def run(options: Options) -> int:
    """Start the servers that the cases need, run the cases, write a report; return the status."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGTERM, _out_of_time)
    signal.alarm(options.budget_s)
    try:
        outcome = _ENGINES[options.engine](options)
    finally:
        signal.alarm(0)
        _pack_logs(options.out)
    document = {
        "engine": options.engine,
        "machine": describe_machine(options),
        "seconds": round(time.monotonic() - began, 1),
        "servers": outcome.servers,
        "cases": [report._asdict() for report in outcome.reports],
        "figures": outcome.figures,
    }
    (options.out / f"{options.engine}.json").write_text(json.dumps(document, indent=1))
    text = f"{_cases_table(outcome.reports)}\n\n{table(outcome.figures)}\n"
    (options.out / f"{options.engine}.txt").write_text(text)
    print(f"\n{text}\n{json.dumps(document)}", flush=True)
    return exit_status(outcome.reports)


def names_of(engine: str, device: DeviceKind) -> list[str]:
    """Return the names of an engine's cases."""
    return [case.name for case in _CASES[engine](is_cuda=device is DeviceKind.CUDA)]


def _vllm(options: Options) -> Outcome:
    scale = vllm_servers.scale_on(options.device)
    machine = Machine("vllm", options.device, options.payload, [scale.model])
    commands = vllm_servers.VllmServers(machine)
    chosen = _chosen(vllm_cases.cases(is_cuda=machine.is_cuda), options)
    with Servers(options.out / "logs") as servers:
        context = vllm_cases.VllmRun(servers, commands, options.repeats)
        specs = commands.specs()
        # The engines look for the discovery service when they start.
        servers.start([specs.pop("discovery")])
        servers.wait(START_SMALL_S)
        names = [name for name in needed(chosen) if name in specs]
        servers.start([specs[name] for name in names])
        servers.wait(options.start_s)
        vllm_cases.warm_up(context, names)
        say("warmed up")
        return Outcome(run_cases(chosen, context, servers), context.figures, servers.starts)


def _sglang(options: Options) -> Outcome:
    scale = sglang_servers.scale_on(options.device)
    sizes = [scale.model, scale.timed_model]
    machine = Machine("sglang", options.device, options.payload, sizes)
    commands = sglang_servers.SglangServers(machine)
    chosen = _chosen(sglang_cases.cases(is_cuda=machine.is_cuda), options)
    with Servers(options.out / "logs") as servers:
        context = sglang_cases.SglangRun(servers, commands, options.repeats)
        specs, names = commands.specs(), needed(chosen)
        servers.start([specs[name] for name in names])
        servers.wait(options.start_s)
        sglang_cases.warm_up(context, names)
        say("warmed up")
        return Outcome(run_cases(chosen, context, servers), context.figures, servers.starts)


def _mooncake(options: Options) -> Outcome:
    machine = Machine("mooncake", options.device, options.payload)
    chosen = _chosen(mooncake_cases.cases(is_cuda=machine.is_cuda), options)
    context = mooncake_cases.MooncakeRun(machine, options.repeats)
    with Servers(options.out / "logs") as servers:
        return Outcome(run_cases(chosen, context, servers), context.figures, servers.starts)


def _chosen(cases: Sequence[Case[Any]], options: Options) -> list[Case[Any]]:
    def is_chosen(case: Case[Any]) -> bool:
        return case.name in options.only if options.only else not case.on_request

    return [case if is_chosen(case) else case._replace(left_out="left out") for case in cases]


def _cases_table(reports: Sequence[CaseReport]) -> str:
    return table(
        [
            {
                "case": report.name,
                "result": report.status,
                "s": f"{report.seconds:.1f}",
                "detail": report.detail,
            }
            for report in reports
        ]
    )


def describe_machine(options: Options) -> dict[str, Any]:
    """Return what a reader of the figures wants to know of the machine."""
    described: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": options.device.value,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    if options.device is DeviceKind.CUDA:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        described["gpu"] = subprocess.run(
            query, check=True, capture_output=True, text=True
        ).stdout.strip()
    return described


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _pack_logs(out: Path) -> None:
    """Put the ends of all logs into one file."""
    logs = out / "logs"
    with tarfile.open(out / "logs.tgz", "w:gz") as archive:
        for log in sorted(logs.glob("*.log")):
            log.write_bytes(log.read_bytes()[-_LOG_BYTES:])
            archive.add(log, log.name)
            log.unlink()
    if logs.exists():
        logs.rmdir()


_ENGINES = {"vllm": _vllm, "sglang": _sglang, "mooncake": _mooncake}
_CASES: Mapping[str, Callable[..., Sequence[Case[Any]]]] = {
    "vllm": vllm_cases.cases,
    "sglang": sglang_cases.cases,
    "mooncake": mooncake_cases.cases,
}
