"""``kvferry serve``: run one part of a cluster until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from kvferry.cli.parsing import Parser, given, whole

EXAMPLE = """example:
  kvferry serve rendezvous                             on this machine only
  kvferry serve rendezvous --host 0.0.0.0 --key cluster.key
"""
DEFAULT_PORT = "7077"
STOPPING = (signal.SIGINT, signal.SIGTERM)


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and the parts that it can run."""
    parser = commands.add_parser(
        "serve",
        help="run the rendezvous",
        description="Run one part of a cluster. Ctrl-C or SIGTERM stops it.",
        epilog=EXAMPLE,
    )
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True, parser_class=Parser)
    _add_rendezvous(parts)


def _add_rendezvous(parts: argparse._SubParsersAction[Any]) -> None:
    parser = parts.add_parser(
        "rendezvous",
        help="where instances register and are found",
        description="Run the service where instances register and are found.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    parser.add_argument(
        "--port", default=DEFAULT_PORT, metavar="N", help=f"0 for any ({DEFAULT_PORT})"
    )
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster key (what KVFERRY_KEY_FILE names, or none)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run_rendezvous)


def run_rendezvous(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    # The web server is large, and the other commands must not wait for its import.
    from kvferry.rendezvous.server import RendezvousServer  # noqa: PLC0415
    from kvferry.runtime.keys import ClusterKey  # noqa: PLC0415

    port = whole("--port", least=0)(args.port)
    path = given("--key", args.key)
    key = ClusterKey.read(path) if path else ClusterKey.from_environment()
    server = RendezvousServer(given("--host", args.host) or "", port, key)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    with stopping_signal() as wait, server:
        _announce(server.url, as_json=args.json)
        wait()
    return 0


@contextlib.contextmanager
def stopping_signal() -> Iterator[Callable[[], None]]:
    """What waits for Ctrl-C or SIGTERM, also for one that came since the beginning of the block.

    A signal may come to any thread, also one that a library has started, and only
    the byte that Python then writes is sure to wake the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield lambda: _read_until(reader, STOPPING)
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _read_until(reader: socket.socket, numbers: Collection[int]) -> None:
    while reader.recv(1)[0] not in numbers:
        pass


def _announce(url: str, *, as_json: bool) -> None:
    text = msgspec.json.encode({"url": url}).decode() if as_json else f"rendezvous on {url}"
    # Whoever started us waits for this line.
    print(text, flush=True)
