"""Probes: checks that run in a child process, because foreign code may crash or hang.

``run_probe`` is the parent's side. ``python -m kvferry.cli.doctor.probes NAME ARGS`` is the
child's: it prints one JSON document. A probe imports what it needs when it runs, so that a
broken package affects no other probe.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import IO, Any

from kvferry.errors import KvferryError

Document = dict[str, Any]
MIB = 1 << 20
SHOWN = 200
PIECE_BYTES = 512


# ---------------------------------------------------------------- parent


class ProbeFailed(KvferryError):
    """A probe ended without a result."""


def run_probe(*words: str, limit_s: float) -> Document:
    """Run a probe in a child process and return its result. Raises ``ProbeFailed``."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    probe = f"the probe '{' '.join(words)}'"
    # Files and not pipes: a process that the child starts could hold a pipe open after its end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            status = subprocess.run(
                # -P: import nothing from the current folder.
                [sys.executable, "-P", "-m", "kvferry.cli.doctor.probes", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": path},
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ProbeFailed(
                f"{probe} did not end within {limit_s:g} s; try again when the machine is less busy"
            ) from None
        except OSError as error:
            raise ProbeFailed(
                f"{probe} can't be started ({error}); check the limit of processes"
            ) from None
        if status:
            raise ProbeFailed(f"{probe} ended with {_exit_name(status)}{_last_line(err)}")
        out.seek(0)
        # Libraries may print before the result.
        document: Document = json.loads(out.read().strip().rpartition(b"\n")[2])
        return document


def _last_line(err: IO[bytes]) -> str:
    err.seek(0)
    lines = err.read().decode("utf-8", "replace").strip().splitlines()
    return f" ({lines[-1].strip()[:SHOWN]})" if lines else ""


def _exit_name(status: int) -> str:
    if status > 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


# ---------------------------------------------------------------- transports


def probe_transport(name: str, device: str) -> Document:
    """Start a transport, register memory of that device, and close it."""
    from kvferry.endpoint.setup import make_transport  # noqa: PLC0415
    from kvferry.memory.staging import allocate  # noqa: PLC0415
    from kvferry.regions import Device, Region  # noqa: PLC0415

    begin = time.perf_counter()
    try:
        transport = make_transport(name)
        try:
            where = Device.parse(device)
            if where.is_host:
                owner: Any = transport.allocate(MIB)
                region = Region(owner.ctypes.data, owner.nbytes)
            else:
                region, owner = allocate(MIB, where)
            transport.register([region], writable=True)
            transport.metadata()
            seconds = time.perf_counter() - begin
        finally:
            transport.close()
    except KvferryError as error:
        return {"problem": str(error)}
    return {"seconds": seconds}


# ---------------------------------------------------------------- copies


def probe_copy() -> Document:
    """Compile or load the copy loop; return its speed beside that of a plain copy."""
    import numpy as np  # noqa: PLC0415

    from kvferry.endpoint.link_costs import scattered  # noqa: PLC0415
    from kvferry.memory.copy.cpu import copy_binding, warm_up  # noqa: PLC0415
    from kvferry.memory.copy.reference import copy_pieces  # noqa: PLC0415
    from kvferry.plan.places import Base  # noqa: PLC0415

    ready_s = warm_up()
    # 64 MiB: larger than the caches, and copied well within a second.
    binding = scattered(Base(0, 0, 0), Base(0, 0, 0), 64 * MIB // PIECE_BYTES, PIECE_BYTES)
    source = np.random.default_rng(0).integers(0, 256, 2 * binding.num_bytes, np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    copy_pieces(binding.descriptors(), [source], [expected])
    addresses = [source.ctypes.data], [target.ctypes.data]
    loop_s = min(_seconds(lambda: copy_binding(binding, *addresses)) for _ in range(5))
    right = np.array_equal(target, expected)
    plain = source[: binding.num_bytes], target[: binding.num_bytes]
    plain_s = min(_seconds(lambda: np.copyto(plain[1], plain[0])) for _ in range(5))
    speeds = {"loop_bytes_per_s": binding.num_bytes / loop_s, "memcpy_ratio": plain_s / loop_s}
    return {"ready_s": ready_s, "right": right, **speeds}


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


# ---------------------------------------------------------------- another process's memory


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def probe_cma(pid: str, address: str, text: str) -> Document:
    """Write a text into another process's memory; return the error number, 0 for success."""
    data = text.encode()
    local = _Iovec(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data))
    remote = _Iovec(int(address), len(data))
    write: Any = ctypes.CDLL(None, use_errno=True).process_vm_writev
    write.restype = ctypes.c_ssize_t
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    written = write(int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, flags)
    return {"errno": 0 if written == len(data) else ctypes.get_errno() or -1}


# ---------------------------------------------------------------- GPUs


def probe_gpus() -> Document:
    """Return the GPUs that the driver lists, and what torch sees of them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    try:
        listed = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False
        )
    except OSError:
        return {"gpus": []}
    lines = listed.stdout.strip().splitlines()
    if listed.returncode:
        return {"gpus": [], "problem": lines[0] if lines else f"status {listed.returncode}"}
    rows = [line.rsplit(", ", 2) for line in lines]
    document: Document = {
        "gpus": [{"name": name, "bytes": int(mib) * MIB} for name, mib, _ in rows],
        "driver": rows[0][2] if rows else "",
    }
    if rows and find_spec("torch"):
        torch: Any = importlib.import_module("torch")
        problem = ""
        try:
            torch.cuda.init()
        except Exception as error:  # Of any type: a build without CUDA, or too old a driver.
            problem = f"{type(error).__name__}: {error}"
        num_gpus = 0 if problem else torch.cuda.device_count()
        document["torch"] = {
            "cuda": torch.version.cuda,
            "num_gpus": num_gpus,
            "problem": problem,
        }
    return document


PROBES: dict[str, Callable[..., Document]] = {
    "transport": probe_transport,
    "copy": probe_copy,
    "cma": probe_cma,
    "gpus": probe_gpus,
}


if __name__ == "__main__":
    print("\n" + json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
