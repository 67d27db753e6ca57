"""The parts of a cluster, each as the whole life of a process."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from kvferry import InputError, freeze_gc

T = TypeVar("T")
Ready = Callable[[str], None]

STOPPING = (signal.SIGINT, signal.SIGTERM)


class PartKind(StrEnum):
    """What a process may be."""

    DISCOVERY = "discovery"
    WORKER = "worker"
    ROUTER = "router"


class DiscoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a discovery service listens, and the file of its key."""

    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = None


def run_part(kind: PartKind, options: dict[str, Any], ready: Ready) -> None:
    """Serve until SIGINT or SIGTERM. ``ready`` is called with the address once that works.

    Raises ``KvferryError`` where it can't start or go on. Each part imports what
    it needs: only a worker needs torch.
    """
    from kvferry.http.limits import raise_open_files  # noqa: PLC0415

    def serves(address: str) -> None:
        freeze_gc()
        ready(address)

    raise_open_files()
    match kind:
        case PartKind.DISCOVERY:
            run_discovery(_read(options, DiscoveryOptions), serves)
        case PartKind.ROUTER:
            from kvferry.router.options import RouterOptions  # noqa: PLC0415
            from kvferry.router.serving import run_router  # noqa: PLC0415

            run_router(_read(options, RouterOptions), serves)
        case PartKind.WORKER:
            from kvferry.reference.worker.instance import InstanceOptions, run_instance  # noqa: PLC0415

            run_instance(_read(options, InstanceOptions), serves)


def _read(options: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"an option can't be used: {error}") from None


def run_discovery(options: DiscoveryOptions, ready: Ready) -> None:
    """Where workers register and are found."""
    from kvferry import DiscoveryServer  # noqa: PLC0415
    from kvferry.http.listening import load_cluster_key  # noqa: PLC0415

    server = DiscoveryServer(options.host, options.port, load_cluster_key(options.key))
    with stop_signals() as told, server:
        ready(server.url)
        wait_for(told)


# ---------------------------------------------------------------- signals


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """A socket that Ctrl-C and SIGTERM are readable from, also if they came in between.

    A signal may come to any thread, also one that a library has started, and only
    the byte that Python then writes is sure to wake the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def wait_for(told: socket.socket, numbers: Collection[int] = STOPPING) -> None:
    """Wait until one of these signals comes."""
    while told.recv(1)[0] not in numbers:
        pass
