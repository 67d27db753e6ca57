"""The parts of NVIDIA's driver API that the cuda transport needs, through ``cuda-bindings``.

The bindings are imported on first use. A call that fails raises ``DriverError``; callers that know
a remedy raise a ``TransportError`` instead. Most calls need a current context, which
``Gpu.current`` provides: the primary context, which torch uses too.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from kvferry.errors import TransportError

_MODULE = "cuda.bindings.driver"
_INSTALL = "pip install 'kvferry[cuda]'"


class DriverError(TransportError):
    """A driver call failed."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")


@cache
def driver() -> Any:
    """Import NVIDIA's bindings. Raises ``ImportError``."""
    return importlib.import_module(_MODULE)


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; return its result, or a tuple of them. Raises ``DriverError``."""
    try:
        status, *results = getattr(driver(), name)(*arguments)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        # Raised by the bindings: a number out of range, or a driver that lacks the function.
        raise DriverError(name, f"{type(error).__name__}: {error}") from error
    if int(status):
        raise DriverError(name, status.name)
    return results[0] if len(results) == 1 else tuple(results)


@cache
def missing() -> str | None:
    """Return what to install before GPU memory can be mapped; None if nothing is missing."""
    try:
        driver()
    except ModuleNotFoundError:
        return f"the cuda transport needs NVIDIA's cuda-bindings; {_INSTALL}"
    except ImportError as error:
        return f"cuda-bindings is installed but cannot be loaded ({error}); {_INSTALL}"
    for package in ("torch", "triton"):
        if not find_spec(package):
            return f"the cuda transport copies with {package}, which is missing; {_INSTALL}"
    try:
        # Load it without initialising it: after that, a forked child could not use a GPU.
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the cuda transport needs NVIDIA's driver ({error}); use shm or nixl without GPUs"
    return None


class Gpu:
    """One GPU, by its number in this process."""

    def __init__(self, number: int) -> None:
        try:
            call("cuInit", 0)
            self.handle = call("cuDeviceGet", number)
            self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        except DriverError as error:
            raise TransportError(
                f"this process cannot use cuda:{number} ({error}); check CUDA_VISIBLE_DEVICES"
            ) from error
        self.number = number
        self.uuid = _uuid(self.handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU current on this thread."""
        call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    def reaches(self, other: int) -> bool:
        """Return whether this GPU can write the memory of the GPU ``other``."""
        if other == self.number:
            return True
        return bool(call("cuDeviceCanAccessPeer", self.handle, call("cuDeviceGet", other)))


def number_of(uuid: bytes) -> int | None:
    """Return the number of the GPU with this UUID; None if this process cannot see it."""
    for number in range(call("cuDeviceGetCount")):
        if _uuid(call("cuDeviceGet", number)) == uuid:
            return number
    return None


def address_range(address: int) -> tuple[int, int]:
    """Return the start and size of the allocation that contains an address."""
    base, num_bytes = call("cuMemGetAddressRange", address)
    return int(base), int(num_bytes)


def _uuid(handle: Any) -> bytes:
    # The second version distinguishes the instances of a partitioned GPU (MIG).
    name = "cuDeviceGetUuid_v2" if hasattr(driver(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return bytes(call(name, handle).bytes)
