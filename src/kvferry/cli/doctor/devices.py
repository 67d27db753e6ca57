"""Checks of transports, GPUs and RDMA devices."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.cli.doctor import Area, DoctorRequest, Finding, State, read_kernel_file
from kvferry.cli.doctor.probes import Document, ProbeFailed, run_probe
from kvferry.cli.parsing import show
from kvferry.errors import InputError
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.transports.registry import GROUP
from kvferry.transports.transport_set import AUTO

TRANSPORTS, GPUS, RDMA = Area("transports"), Area("gpus"), Area("rdma")

TRANSPORT_LIMIT_S = 30.0
# The packages that a built-in transport may use.
PACKAGES = {
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
    "cuda": ("cuda-bindings",),
}
# The only device that these transports carry.
DEVICES = {"cuda": "cuda", "shm": "cpu"}

# Importing torch and starting a GPU take some seconds.
GPU_LIMIT_S = 45.0
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")

INFINIBAND = "sys/class/infiniband"
VERBS = "libibverbs.so.1"


# ---------------------------------------------------------------- transports


def installed_transports(request: DoctorRequest) -> list[str]:
    """Return every installed transport, the requested ones first."""
    known = sorted(entry_points(group=GROUP).names)
    for name in request.transports:
        if name not in known:
            raise InputError(
                f"there is no transport {show(name)}; choose one of {', '.join(known)}, auto, "
                f"or install the package that adds it"
            )
    return list(dict.fromkeys([*request.transports, *known]))


def start_transports(
    request: DoctorRequest, names: Sequence[str], pool: Executor
) -> dict[str, Future[Document]]:
    """Start every transport in a process of its own."""
    started = {}
    for name in names:
        device = request.device if request.needs(name) else DEVICES.get(name, request.device)
        words = ("transport", name, device)
        started[name] = pool.submit(run_probe, *words, limit_s=TRANSPORT_LIMIT_S)
    return started


def check_transports(
    request: DoctorRequest, started: Mapping[str, Future[Document]]
) -> Iterator[Finding]:
    """Report how each transport started."""
    findings = [
        _transport(name, probe, needed=request.needs(name)) for name, probe in started.items()
    ]
    if request.transport == AUTO:
        working = {finding.name for finding in findings if finding.state is State.OK}
        yield _auto(request, working)
    yield from findings


def _auto(request: DoctorRequest, working: Container[str]) -> Finding:
    """Say which transports ``auto`` chooses if the other side has them too."""
    mapped = ["shm" if request.on_host else "cuda"]
    remote = [name for name in request.transports if name not in ("shm", "cuda")]
    near = [name for name in mapped + remote if name in working]
    far = [name for name in remote if name in working]
    if not near:
        return TRANSPORTS.problem(AUTO, "no transport works here; see why below, and install one")
    others = far[0] if far else "none: pip install 'kvferry[nixl]' to reach other hosts"
    detail = f"chooses {near[0]} for peers that share this host's memory, and for others {others}"
    return TRANSPORTS.ok(AUTO, detail)


def _transport(name: str, probe: Future[Document], *, needed: bool) -> Finding:
    try:
        found = probe.result()
    except ProbeFailed as error:
        remedy = f"reinstall the package of {name}, or choose another transport"
        return TRANSPORTS.issue(name, str(error), remedy, needed=needed)
    if "problem" in found:
        return TRANSPORTS.issue(name, found["problem"], needed=needed)
    took = human_seconds(found["seconds"])
    return TRANSPORTS.ok(name, f"{_transport_version(name)}; started in {took}")


def _transport_version(name: str) -> str:
    """Return name and version of the package that a transport uses or comes from."""
    packages = {package: _package_version(package) for package in PACKAGES.get(name, ())}
    dists = (entry.dist for entry in entry_points(group=GROUP, name=name))
    packages |= {dist.name: dist.version for dist in dists if dist is not None}
    named = (f"{package} {number}" for package, number in packages.items() if number is not None)
    return next(named, "of unknown version")


# ---------------------------------------------------------------- GPUs


def check_gpus(
    request: DoctorRequest, probe: Future[Document], has_rdma: bool
) -> Iterator[Finding]:
    """Check that GPUs, torch and Triton can be used."""
    needed = not request.on_host
    try:
        found = probe.result()
    except ProbeFailed as error:
        remedy = "see whether nvidia-smi works, and `python -c 'import torch; torch.cuda.init()'`"
        yield GPUS.issue("cards", str(error), remedy, needed=needed)
        return
    yield _cards(found, needed)
    yield judge_torch(found.get("torch"), _package_version("torch"), needed)
    if not found["gpus"]:
        return
    if find_spec("triton"):
        yield GPUS.ok("triton", f"{_package_version('triton')}, for staging on a GPU")
    else:
        detail = "not installed, and staging on a GPU needs it"
        yield GPUS.issue("triton", detail, "pip install triton", needed=needed)
    yield from check_allocator(os.environ)
    if has_rdma:
        yield judge_gpudirect(read_kernel_file(Path("/proc/modules")) or "")


def _cards(found: Document, needed: bool) -> Finding:
    if found["gpus"]:
        shown = Counter(f"{gpu['name']} {human_bytes(gpu['bytes'])}" for gpu in found["gpus"])
        listed = ", ".join(f"{count} x {name}" for name, count in shown.items())
        return GPUS.ok("cards", f"{listed}, driver {found['driver']}")
    if found.get("problem"):
        detail = f"the driver does not work ({found['problem']})"
        return GPUS.issue("cards", detail, "reinstall it, or reboot", needed=needed)
    if needed:
        remedy = "install the driver, give the container the GPUs (--gpus all), or use the cpu"
        return GPUS.problem("cards", "none found", remedy)
    return GPUS.ok("cards", "none found")


def judge_torch(seen: Mapping[str, Any] | None, installed: str | None, needed: bool) -> Finding:
    """Judge the installed torch; ``seen`` is what it sees of the GPUs, None if there are none."""
    if installed is None:
        if needed:
            return GPUS.problem("torch", "not installed", "pip install 'kvferry[torch]'")
        return GPUS.ok("torch", "not installed; only pools on a GPU need it")
    if seen is None:
        return GPUS.ok("torch", f"{installed}, without a GPU to use")
    if not seen["num_gpus"]:
        why = seen["problem"] or "CUDA_VISIBLE_DEVICES hides them"
        remedy = "install a build of torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES"
        return GPUS.issue("torch", f"{installed} sees no GPU ({why})", remedy, needed=needed)
    return GPUS.ok("torch", f"{installed}, CUDA {seen['cuda']}, sees {seen['num_gpus']}")


def check_allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Warn of expandable segments: UCX registers them but cannot share them by cuda_ipc."""
    why = "which NIXL's UCX can't share between processes and then moves hundreds of times slower"
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower():
            remedy = f"take expandable_segments out of {name}, or allocate the pools outside"
            yield GPUS.note("allocator", f"{name} asks for expandable segments, {why}", remedy)


def judge_gpudirect(modules: str) -> Finding:
    """Judge by /proc/modules whether a network card can access GPU memory."""
    name = "GPUDirect RDMA"
    loaded = {line.partition(" ")[0] for line in modules.splitlines()}
    for module in PEER_MEMORY_MODULES:
        if module in loaded:
            return GPUS.ok(name, f"{module} is loaded")
    detail = "nvidia_peermem is not loaded, so RDMA needs a driver with dma-buf for GPU memory"
    remedy = "modprobe nvidia_peermem, or use the driver's open kernel modules"
    return GPUS.note(name, detail, remedy)


def _package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------- RDMA


class RdmaPort(NamedTuple):
    """One port of one RDMA device, as the kernel describes it."""

    device: str
    number: str
    state: str
    rate: str
    link_layer: str

    def __str__(self) -> str:
        state = self.state.rpartition(": ")[2]
        return f"{self.device} port {self.number}: {state}, {self.rate}, {self.link_layer}"


def rdma_ports(root: Path = Path("/")) -> list[RdmaPort]:
    """Return every port of every RDMA device."""
    return [
        RdmaPort(
            port.parent.parent.name,
            port.name,
            *(read_kernel_file(port / name) or "unknown" for name in RdmaPort._fields[2:]),
        )
        for port in sorted((root / INFINIBAND).glob("*/ports/*"))
    ]


def check_rdma(ports: Sequence[RdmaPort], root: Path = Path("/")) -> Iterator[Finding]:
    """Check that ports are up and that this user may open the devices."""
    if not ports:
        yield RDMA.ok("devices", "none found; between hosts, transports use TCP")
        return
    for port in ports:
        if port.state.endswith("ACTIVE"):
            yield RDMA.ok(port.device, str(port))
        else:
            remedy = "check its cable, its switch and, for InfiniBand, the subnet manager"
            yield RDMA.note(port.device, str(port), remedy)
    verbs = (root / "dev/infiniband").glob("uverbs*")
    if not any(os.access(one, os.R_OK | os.W_OK) for one in verbs):
        detail = "this process may not open any of /dev/infiniband/uverbs*"
        remedy = "docker run --device /dev/infiniband, or join the group that owns them"
        yield RDMA.note("access", detail, remedy)


def check_verbs_library(request: DoctorRequest) -> Finding:
    """Check for libibverbs, which Mooncake loads even if it uses TCP."""
    if sys.platform != "linux":
        return RDMA.ok(VERBS, "not on this system")
    try:
        ctypes.CDLL(VERBS)
    except OSError as error:
        remedy = "apt-get install libibverbs1, or dnf install libibverbs"
        needed = request.needs("mooncake")
        return RDMA.issue(VERBS, f"can't be loaded ({error})", remedy, needed=needed)
    return RDMA.ok(VERBS, "can be loaded")
