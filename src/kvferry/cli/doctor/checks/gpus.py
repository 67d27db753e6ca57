"""GPUs, what torch makes of them, and what keeps peers from their memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry.cli.doctor.checks.check import Asked, Check, lacking, ok
from kvferry.cli.doctor.checks.children import ProbeChild, ProbeFailed
from kvferry.cli.doctor.checks.machine import read
from kvferry.plan.units import human_bytes

AREA = "gpus"
# Importing torch and waking a GPU takes some seconds.
LIMIT_S = 45.0
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")


def cards(asked: Asked, child: ProbeChild, has_rdma: bool) -> Iterator[Check]:
    """What was found, and whether it can be used."""
    wanted = not asked.on_host
    try:
        found = child.answer()
    except ProbeFailed as error:
        remedy = "see whether nvidia-smi works, and `python -c 'import torch; torch.cuda.init()'`"
        yield lacking(AREA, "cards", str(error), needed=wanted, remedy=remedy)
        return
    if not found["gpus"]:
        yield _none(found.get("problem", ""), wanted)
    else:
        shown = Counter(f"{gpu['name']} {human_bytes(gpu['bytes'])}" for gpu in found["gpus"])
        listed = ", ".join(f"{count} x {name}" for name, count in shown.items())
        yield ok(AREA, "cards", f"{listed}, driver {found['driver']}")
    yield judge_torch(found.get("torch"), _version("torch"), wanted)
    if found["gpus"]:
        yield from _kernels(wanted)
        yield from allocator(os.environ)
        if has_rdma:
            yield direct(read(Path("/proc/modules")) or "")


def _none(problem: str, wanted: bool) -> Check:
    if problem:
        told = f"the driver does not work ({problem})"
        return lacking(AREA, "cards", told, needed=wanted, remedy="reinstall it, or reboot")
    if wanted:
        remedy = "install the driver, give the container the GPUs (--gpus all), or use the cpu"
        return lacking(AREA, "cards", "none found", needed=True, remedy=remedy)
    return ok(AREA, "cards", "none found")


def judge_torch(seen: Mapping[str, Any] | None, installed: str | None, wanted: bool) -> Check:
    """Whether torch is there and sees the GPUs; ``seen`` is None where there are none."""
    if installed is None:
        told = "not installed; only pools on a GPU need it"
        if not wanted:
            return ok(AREA, "torch", told)
        return lacking(
            AREA, "torch", "not installed", needed=True, remedy="pip install 'kvferry[torch]'"
        )
    if seen is None:
        return ok(AREA, "torch", f"{installed}, without a GPU to use")
    if not seen["num_gpus"]:
        why = seen["problem"] or "CUDA_VISIBLE_DEVICES hides them"
        told = f"{installed} sees no GPU ({why})"
        remedy = "install a build of torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES"
        return lacking(AREA, "torch", told, needed=wanted, remedy=remedy)
    return ok(AREA, "torch", f"{installed}, CUDA {seen['cuda']}, sees {seen['num_gpus']}")


def _kernels(wanted: bool) -> Iterator[Check]:
    if find_spec("triton"):
        yield ok(AREA, "triton", f"{_version('triton') or 'installed'}, for staging on a GPU")
    else:
        told = "not installed, and staging on a GPU needs it"
        yield lacking(AREA, "triton", told, needed=wanted, remedy="pip install triton")


def allocator(environment: Mapping[str, str]) -> Iterator[Check]:
    """Memory of expandable segments can be registered, but UCX does not share it by cuda_ipc."""
    for name in ALLOCATOR:
        if "expandable_segments:true" in environment.get(name, "").lower():
            yield lacking(
                AREA,
                "allocator",
                f"{name} asks for expandable segments, which NIXL's UCX can't share between "
                f"processes and then moves hundreds of times slower",
                needed=False,
                remedy=f"take expandable_segments out of {name}, or allocate the pools outside",
            )


def direct(modules: str) -> Check:
    """Whether a network card may reach GPU memory by itself."""
    loaded = {line.partition(" ")[0] for line in modules.splitlines()}
    found = [name for name in PEER_MEMORY if name in loaded]
    if found:
        return ok(AREA, "GPUDirect RDMA", f"{found[0]} is loaded")
    return lacking(
        AREA,
        "GPUDirect RDMA",
        "nvidia_peermem is not loaded, so RDMA reaches GPU memory only if the driver has dma-buf",
        needed=False,
        remedy="modprobe nvidia_peermem, or use the driver's open kernel modules",
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
