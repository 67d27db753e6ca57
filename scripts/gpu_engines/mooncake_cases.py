"""The cases of Mooncake's CUDA package: a request's cache between GPU pools, bytes verified."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_engines.checklist import Case, CaseFailed, expect
from gpu_engines.machine import Machine

# Libraries outside of its wheel that Mooncake's engine needs, and the same ones in NIXL's.
_SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs-*",
    "libmlx5.so.1": "libmlx5-*",
    "libnuma.so.1": "libnuma-*",
    "libcurl.so.4": "libcurl-*",
}
_CUDA_RUNTIME = "libcudart.so.13"
# 67 MB: Mooncake's TCP copies GPU memory through the host.
_SIZES = (
    *("--layers", "16", "--kv-heads", "8", "--head-dim", "128"),
    *("--dtype", "bfloat16", "--tokens", "1024"),
)
_LIMIT_S = 120.0


class MooncakeRun:
    """The environment with Mooncake's libraries, and measured figures."""

    def __init__(self, machine: Machine, repeats: int) -> None:
        self.device = machine.device.value
        self.repeats = repeats
        self.figures: list[dict[str, Any]] = []
        path = os.pathsep.join(map(str, _library_folders(machine)))
        self.environment = machine.environment() | {"LD_LIBRARY_PATH": path}

    def transfer(self, prefill: str, decode: str) -> str:
        """Carry a request's cache between processes and return what was seen."""
        command = [sys.executable, "-m", "kvferry", "bench", "transfer", "--json", *_SIZES]
        command += ["--transport", "mooncake", "--device", self.device]
        command += ["--prefill", prefill, "--decode", decode, "--repeat", str(self.repeats)]
        done = subprocess.run(
            command,
            check=False,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        if done.returncode or not done.stdout.strip():
            raise CaseFailed((done.stderr or done.stdout).strip()[-500:])
        report = json.loads(done.stdout.strip().splitlines()[-1])
        expect(report["verified"] is True, f"bytes differ: {report}")
        expect(report["device"] == self.device, f"the pools are on {report['device']}")
        median_ms = 1e3 * report["seconds"]["median"]
        figure = {"prefill": prefill, "decode": decode, "mode": report["mode"]}
        self.figures.append(figure | {"bytes": report["bytes"], "median_ms": round(median_ms, 1)})
        return f"{report['bytes'] / 1e6:.0f} MB in {median_ms:.1f} ms, every byte verified"


def _library_folders(machine: Machine) -> Iterator[Path]:
    """Yield folders with the libraries that this system lacks."""
    if machine.site is not None:
        bundled = machine.site / "nixl_cu13.libs"
        links = machine.folder / "mooncake-libraries"
        links.mkdir(exist_ok=True)
        for name, pattern in _SYSTEM_LIBRARIES.items():
            if not _is_found(name) and not (links / name).exists():
                (links / name).symlink_to(next(bundled.glob(pattern)))
        yield from (links, bundled)
    if not _is_found(_CUDA_RUNTIME):
        for folder in (Path(place) for place in sys.path):
            yield from (each.parent for each in folder.glob(f"nvidia/*/lib/{_CUDA_RUNTIME}"))


def _is_found(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def equal_tp(run: MooncakeRun) -> str:
    return run.transfer("tp=1,page=16", "tp=1,page=16")


def tp2_to_tp1_with_other_pages(run: MooncakeRun) -> str:
    return run.transfer("tp=2,page=16", "tp=1,page=64")


def cases(*, is_cuda: bool) -> Sequence[Case[MooncakeRun]]:
    """Return all cases; they need no servers."""
    return [Case(equal_tp, ()), Case(tp2_to_tp1_with_other_pages, ())]
