"""The processes of a cluster: discovery service, worker or router, as the whole life of one.

``python -m kvferry.reference.cluster.process`` is a part as a child of ``launch.py``. Its
standard input is its lifeline: the first line says what to run, and when the input ends, the
parent wants the child to stop, or is gone. On standard output it reports that it is ready, or
why it is not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from kvferry import InputError, KvferryError, Refused, TransportError, freeze_gc
from kvferry.telemetry.logs.lines import LogSettings, install

T = TypeVar("T")
Ready = Callable[[str], None]

STOPPING = (signal.SIGINT, signal.SIGTERM)
# From the end of the lifeline to the end of the process, even if it hangs.
GRACE_S = 15.0
EXIT_FAILED = 1


class PartKind(StrEnum):
    """Kinds of processes."""

    DISCOVERY = "discovery"
    WORKER = "worker"
    ROUTER = "router"


class DiscoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a discovery service listens, and its key file."""

    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = None


def run_part(kind: PartKind, options: dict[str, Any], ready: Ready) -> None:
    """Serve until SIGINT or SIGTERM; call ``ready`` with the address once it serves.

    Raises ``KvferryError`` if it cannot start or go on. Each part imports only what it needs:
    only a worker needs torch.
    """
    from kvferry.http.limits import raise_open_files  # noqa: PLC0415

    def serves(address: str) -> None:
        freeze_gc()
        ready(address)

    raise_open_files()
    match kind:
        case PartKind.DISCOVERY:
            _run_discovery(_read(options, DiscoveryOptions), serves)
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


def _run_discovery(options: DiscoveryOptions, ready: Ready) -> None:
    from kvferry import DiscoveryServer  # noqa: PLC0415
    from kvferry.http.listening import load_cluster_key  # noqa: PLC0415

    server = DiscoveryServer(options.host, options.port, load_cluster_key(options.key))
    with stop_signals() as signals, server:
        ready(server.url)
        while signals.recv(1)[0] not in STOPPING:
            pass


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """Yield a socket from which the numbers of SIGINT and SIGTERM can be read.

    A signal may be delivered to any thread; only the byte that Python then writes is sure to
    wake the main thread.
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


# ---------------------------------------------------------------- as a child


class ChildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to run."""

    name: str
    kind: PartKind
    options: dict[str, Any]
    log_level: str = "WARNING"


class ChildReport(msgspec.Struct, frozen=True, kw_only=True):
    """A child's address, or why it failed. ``is_input``: the user can correct it."""

    url: str = ""
    error: str = ""
    is_input: bool = False


def main() -> int:
    """Run as a child; return the exit status."""
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte, because the rest is for the thread that watches the lifeline.
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)
        line += byte
    order = msgspec.json.decode(line, type=ChildOrder)
    threading.Thread(target=_end_with_parent, name="kvferry-parent", daemon=True).start()
    # Libraries that print to standard output must not reach the parent.
    output = os.dup(1)
    os.dup2(2, 1)

    def report(said: ChildReport) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(output, msgspec.json.encode(said) + b"\n")

    # A worker's own process is its rank 0.
    install(LogSettings(order.name, order.log_level, 0 if order.kind is PartKind.WORKER else None))
    try:
        run_part(order.kind, order.options, lambda url: report(ChildReport(url=url)))
    except KvferryError as error:
        is_input = isinstance(error, InputError | Refused | TransportError)
        report(ChildReport(error=str(error), is_input=is_input))
        return EXIT_FAILED
    return 0


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    # Exit without waiting for the engine's thread, which may be in the middle of a step.
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
