"""The Mooncake package: loaded when first needed, started as asked, and kept quiet."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import msgspec

from kvferry.errors import TransportError

# The level of Google's logging below which nothing is printed, as its C++ name is mangled.
_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
_ERROR, _FATAL = 2, 3
# The environment is everybody's.
_starting = threading.Lock()


@cache
def load() -> Any:
    """Mooncake's engine module. Raises ``ImportError`` if it can't be had."""
    module = importlib.import_module("mooncake.engine")
    level = _level(module)
    if level is not None:
        level.value = _ERROR
    return module


def missing() -> str | None:
    """What to install, in one sentence; None if Mooncake is there."""
    try:
        load()
    except ImportError as error:
        return remedy(error)
    return None


def remedy(error: ImportError) -> str:
    """What to do about a module that can't be loaded."""
    if "libibverbs.so.1" in str(error):
        return "Mooncake needs libibverbs.so.1; install it: apt-get install libibverbs1"
    if "libcudart" in str(error):
        return (
            "this build of Mooncake needs CUDA's runtime library; install that, or for host "
            "memory: pip install mooncake-transfer-engine-non-cuda"
        )
    if isinstance(error, ModuleNotFoundError):
        return "the mooncake transport needs Mooncake; pip install 'kvferry[mooncake]'"
    return f"Mooncake is installed but can't be loaded ({error}); reinstall it"


def start(host: str, protocol: str, device: str) -> Any:
    """An engine that peers reach by ``host``. Raises ``TransportError``."""
    if protocol not in ("tcp", "rdma"):
        raise TransportError(f"Mooncake's protocol is tcp or rdma here, not {protocol!r}")
    try:
        engine = load().TransferEngine()
        with _starting, hushed(), _forced(protocol):
            code = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        found = protocol == "tcp" or _has_devices(engine.get_local_topology(device))
    except Exception as error:  # Foreign exceptions end here.
        raise TransportError(f"Mooncake can't be started ({error})") from error
    if not found:
        raise TransportError(
            f"Mooncake finds no RDMA device {device}".rstrip() + "; name one that there is with "
            "the option device, or use the protocol tcp"
        )
    if code:
        raise TransportError(
            f"Mooncake can't be started for {protocol} on {host} (it says {code}); "
            f"check the host, or set MC_LOG_LEVEL=INFO to see more"
        )
    return engine


@contextmanager
def _forced(protocol: str) -> Iterator[None]:
    """Mooncake takes no notice of the protocol: it uses RDMA where there is a device for it.

    A variable of the environment forbids that, and is read while an engine is started.
    """
    variable = "MC_FORCE_TCP"
    if protocol != "tcp" or variable in os.environ:
        yield
        return
    os.environ[variable] = "1"
    try:
        yield
    finally:
        del os.environ[variable]


def _has_devices(topology: str) -> bool:
    """Without any, Mooncake would use TCP. Each place has preferred and other devices."""
    places: dict[str, list[list[str]]] = msgspec.json.decode(topology or "{}")
    return any(names for devices in places.values() for names in devices)


@contextmanager
def hushed() -> Iterator[bool]:
    """Print nothing for now, where Mooncake complains of what is as it should be.

    Tells whether that can be done.
    """
    level = _level(load())
    if level is None:
        yield False
        return
    level.value = _FATAL
    try:
        yield True
    finally:
        level.value = _ERROR


def stop_listening(port: int) -> None:
    """Let the engine of that port end at once.

    Its end waits for a thread that looks only once a second whether it is to stop, and
    no Python runs meanwhile. A listener that is shut down makes it look again and again.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        # Others may close their files meanwhile.
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if _listens(found) and found.getsockname()[1] == port:
                        found.shutdown(socket.SHUT_RDWR)


def _listens(found: socket.socket) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _level(module: Any) -> ctypes.c_int | None:
    """Its log level in memory; None if the user rules it, or if it is not to be found.

    The variable ``MC_LOG_LEVEL`` is read once while the module is loaded. Setting it for
    that would also set it for every process that we start.
    """
    if "MC_LOG_LEVEL" in os.environ:
        return None
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), _LEVEL)
    except (OSError, ValueError):
        return None
