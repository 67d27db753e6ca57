"""NVIDIA's driver, as far as the cuda transport needs it, through NVIDIA's own bindings.

Nothing is imported before it is needed. A call that the driver refuses raises
``DriverError``; who knows what can be done about it says so instead. A call works in a
context, so whoever makes one says in which GPU's (``Gpu.current``); it is the primary one,
which torch uses too.
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
    """The driver did not do what it was asked to."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.status = status


@cache
def driver() -> Any:
    """NVIDIA's bindings. Raises ``ImportError``."""
    return importlib.import_module(_MODULE)


def call(name: str, *arguments: Any) -> Any:
    """Ask the driver: its answer, or a tuple of them."""
    try:
        status, *answer = getattr(driver(), name)(*arguments)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        # The bindings' own refusals: a number that does not fit, or a driver too old for it.
        raise DriverError(name, f"{type(error).__name__}: {error}") from error
    if int(status):
        raise DriverError(name, status.name)
    return answer[0] if len(answer) == 1 else tuple(answer)


@cache
def missing() -> str | None:
    """What to install before GPU memory can be mapped; None if nothing is missing."""
    try:
        driver()
    except ModuleNotFoundError:
        return f"the cuda transport needs NVIDIA's cuda-bindings; {_INSTALL}"
    except ImportError as error:
        return f"cuda-bindings is installed but can't be loaded ({error}); {_INSTALL}"
    for package in ("torch", "triton"):
        if not find_spec(package):
            return f"the cuda transport copies with {package}, which is missing; {_INSTALL}"
    try:
        # Loaded and not initialised: after that, a forked child could not use a GPU any more.
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the cuda transport needs NVIDIA's driver ({error}); use shm or nixl without GPUs"
    return None


class Gpu:
    """One GPU, by the number that this process knows it by."""

    def __init__(self, number: int) -> None:
        try:
            call("cuInit", 0)
            self.handle = call("cuDeviceGet", number)
            self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        except DriverError as error:
            raise TransportError(
                f"there is no cuda:{number} that this process can use ({error}); "
                f"look at CUDA_VISIBLE_DEVICES"
            ) from error
        self.number = number
        self.uuid = _uuid(self.handle)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Calls inside are about this GPU, on this thread."""
        call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")

    def reaches(self, other: int) -> bool:
        """Whether it can write the memory of the GPU of that number."""
        if other == self.number:
            return True
        return bool(call("cuDeviceCanAccessPeer", self.handle, call("cuDeviceGet", other)))


def number_of(uuid: bytes) -> int | None:
    """The number of the GPU with that UUID; None if this process can't see it."""
    for number in range(call("cuDeviceGetCount")):
        if _uuid(call("cuDeviceGet", number)) == uuid:
            return number
    return None


def address_range(address: int) -> tuple[int, int]:
    """Where the allocation around an address begins, and its size."""
    base, num_bytes = call("cuMemGetAddressRange", address)
    return int(base), int(num_bytes)


def _uuid(handle: Any) -> bytes:
    # The second version tells the parts of a divided GPU from each other.
    name = "cuDeviceGetUuid_v2" if hasattr(driver(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    return bytes(call(name, handle).bytes)
