"""Import and start of Mooncake's engine, with its logging under control."""

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

# glog's minimum level, under its mangled C++ name.
_LEVEL_SYMBOL = "_ZN3fLI17FLAGS_minloglevelE"
_ERROR, _FATAL = 2, 3
_FORCE_TCP = "MC_FORCE_TCP"
# Held while an engine starts, because that sets an environment variable.
_start_lock = threading.Lock()


@cache
def load() -> Any:
    """Import Mooncake's engine module. Raises ``ImportError``."""
    module = importlib.import_module("mooncake.engine")
    level = _log_level(module)
    if level is not None:
        level.value = _ERROR
    return module


def missing() -> str | None:
    """Return what to install, in one sentence; None if Mooncake can be imported."""
    try:
        load()
    except ImportError as error:
        return remedy(error)
    return None


def remedy(error: ImportError) -> str:
    """Return what to do about a failed import."""
    if "libibverbs.so.1" in str(error):
        return "Mooncake needs libibverbs.so.1; install it: apt-get install libibverbs1"
    if "libcudart" in str(error):
        return (
            "this build of Mooncake needs CUDA's runtime library; install that, or for host "
            "memory: pip install mooncake-transfer-engine-non-cuda"
        )
    if isinstance(error, ModuleNotFoundError):
        return "the mooncake transport needs Mooncake; pip install 'kvferry[mooncake]'"
    return f"Mooncake is installed but cannot be loaded ({error}); reinstall it"


def start(host: str, protocol: str, device: str) -> Any:
    """Start an engine that peers reach by ``host``. Raises ``TransportError``."""
    if protocol not in ("tcp", "rdma"):
        raise TransportError(f"Mooncake's protocol must be tcp or rdma, not {protocol!r}")
    try:
        engine = load().TransferEngine()
        with _start_lock, silenced(), _forced(protocol):
            code = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        found = protocol == "tcp" or _has_devices(engine.get_local_topology(device))
    except Exception as error:
        raise TransportError(f"Mooncake cannot start ({error}); check its installation") from error
    if not found:
        raise TransportError(
            f"Mooncake finds no RDMA device {device}".rstrip() + "; name an existing one with "
            "the option device, or use the protocol tcp"
        )
    if code:
        raise TransportError(
            f"Mooncake cannot start with {protocol} on {host} (its code is {code}); "
            f"check the host, or set MC_LOG_LEVEL=INFO for details"
        )
    return engine


@contextmanager
def _forced(protocol: str) -> Iterator[None]:
    """Make Mooncake use TCP if that was requested.

    It ignores its protocol argument and uses RDMA wherever there is a device. An environment
    variable, which it reads while an engine starts, prevents that.
    """
    if protocol != "tcp" or _FORCE_TCP in os.environ:
        yield
        return
    os.environ[_FORCE_TCP] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCE_TCP]


def _has_devices(topology: str) -> bool:
    """Return whether any location has RDMA devices. Without any, Mooncake would use TCP."""
    places: dict[str, list[list[str]]] = msgspec.json.decode(topology or "{}")
    return any(names for devices in places.values() for names in devices)


@contextmanager
def silenced() -> Iterator[bool]:
    """Suppress Mooncake's log where it complains about normal events; yield whether it worked."""
    level = _log_level(load())
    if level is None:
        yield False
        return
    level.value = _FATAL
    try:
        yield True
    finally:
        level.value = _ERROR


def stop_listening(port: int) -> None:
    """Shut down the listening socket of an engine, so that the engine ends at once.

    Its destructor waits for a thread that checks for the end only once a second, with the GIL
    held. On a shut-down socket that thread loops without waiting.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        # Other threads may close their files meanwhile.
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if _listens(found) and found.getsockname()[1] == port:
                        found.shutdown(socket.SHUT_RDWR)


def _listens(found: socket.socket) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _log_level(module: Any) -> ctypes.c_int | None:
    """Return Mooncake's log level in memory; None if the user has set it or it is not found.

    Mooncake reads ``MC_LOG_LEVEL`` only while the module is loaded, and setting the variable here
    would pass it on to child processes.
    """
    if "MC_LOG_LEVEL" in os.environ:
        return None
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), _LEVEL_SYMBOL)
    except (OSError, ValueError):
        return None
