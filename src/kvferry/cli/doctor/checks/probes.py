"""The probes: what child processes do. ``python -m ... NAME WORDS`` prints one JSON document.

Nothing is imported before a probe needs it, so that what is broken harms no other
probe, and a small one starts quickly.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

Document = dict[str, Any]
MIB = 1 << 20


# ---------------------------------------------------------------- transports


def transport(name: str, device: str) -> Document:
    """Start a transport, let it take memory of that device, and end it."""
    from kvferry.endpoint.setup import make_transport  # noqa: PLC0415
    from kvferry.errors import KvferryError  # noqa: PLC0415

    begin = time.perf_counter()
    try:
        made = make_transport(name)
        try:
            region, _owner = _memory(made, device)
            made.register([region], writable=True)
            made.metadata()
            seconds = time.perf_counter() - begin
        finally:
            made.close()
    except KvferryError as error:
        return {"problem": str(error)}
    return {"seconds": seconds}


def _memory(made: Any, device: str) -> tuple[Any, object]:
    """A region as pools have it, and what keeps it alive."""
    from kvferry.memory.staging import allocate  # noqa: PLC0415
    from kvferry.regions import Device, Region  # noqa: PLC0415

    where = Device.parse(device)
    if not where.is_host:
        return allocate(MIB, where)
    array = made.allocate(MIB)
    return Region(array.ctypes.data, array.nbytes), array


# ---------------------------------------------------------------- copies


def copy() -> Document:
    """Compile or load the copy loop, and compare it with a plain copy."""
    from kvferry.cli.doctor.checks.copy_speed import measure  # noqa: PLC0415
    from kvferry.memory.copy.cpu import warm_up  # noqa: PLC0415

    ready_s = warm_up()
    return {"ready_s": ready_s, **measure()._asdict()}


# ---------------------------------------------------------------- another process's memory


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def cma(pid: str, address: str, length: str) -> Document:
    """Turn every bit in another process's memory, by reading it and writing it back."""
    num_bytes = int(length)
    ours = (ctypes.c_ubyte * num_bytes)()
    local = _Iovec(ctypes.addressof(ours), num_bytes)
    remote = _Iovec(int(address), num_bytes)

    def call(name: str) -> int:
        """The error number; 0 if all bytes moved."""
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
        function.restype = ctypes.c_ssize_t
        one = ctypes.c_ulong(1)
        moved = function(
            int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0)
        )
        return 0 if moved == num_bytes else ctypes.get_errno() or -1

    error = call("process_vm_readv")
    if not error:
        for index in range(num_bytes):
            ours[index] ^= 0xFF
        error = call("process_vm_writev")
    return {"errno": error}


# ---------------------------------------------------------------- GPUs


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpus() -> Document:
    """The driver's own list of GPUs, and what torch makes of them."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {"gpus": []}
    status = nvml.nvmlInit_v2()
    if status:
        return {"gpus": [], "problem": _nvml_error(nvml, status)}
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = [_gpu(nvml, index) for index in range(count.value)]
    driver = ctypes.create_string_buffer(96)
    nvml.nvmlSystemGetDriverVersion(driver, len(driver))
    document: Document = {"gpus": found, "driver": driver.value.decode("ascii", "replace")}
    if found and find_spec("torch"):
        document["torch"] = _torch()
    return document


def _nvml_error(nvml: Any, status: int) -> str:
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    text: bytes = nvml.nvmlErrorString(status)
    return text.decode("ascii", "replace")


def _gpu(nvml: Any, index: int) -> Document:
    handle, memory = ctypes.c_void_p(), _MemoryInfo()
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return {"name": name.value.decode("ascii", "replace"), "bytes": memory.total}


def _torch() -> Document:
    torch: Any = importlib.import_module("torch")
    problem = ""
    try:
        torch.cuda.init()
    except Exception as error:  # Of every kind, from a missing build to an old driver.
        problem = f"{type(error).__name__}: {error}"
    num_gpus = 0 if problem else torch.cuda.device_count()
    return {"cuda": torch.version.cuda, "num_gpus": num_gpus, "problem": problem}


PROBES: dict[str, Callable[..., Document]] = {
    "transport": transport,
    "copy": copy,
    "cma": cma,
    "gpus": gpus,
}


if __name__ == "__main__":
    print("\n" + json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
