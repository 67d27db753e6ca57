"""A part of a cluster as a child process: ``python -m kvferry.reference.cluster.child``.

Standard input is its lifeline. The first line says what to be; when it ends, the
parent wants an end, or is gone, and so is this process soon after. On standard
output it says once that it is ready, or why it is not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry import InputError, KvferryError, Refused, TransportError
from kvferry.reference.cluster.parts import PartKind, run_part
from kvferry.telemetry.logs.lines import LogSettings, install

# From the parent's end to ours, whatever hangs.
GRACE_S = 15.0
EXIT_FAILED = 1
MENDABLE = (InputError, Refused, TransportError)


class ChildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to be."""

    name: str
    kind: PartKind
    options: dict[str, Any]
    log_level: str = "WARNING"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a child says: its address, or a sentence; ``is_input`` if the user can mend it."""

    url: str = ""
    error: str = ""
    is_input: bool = False


def main() -> int:
    """The life of a child."""
    order = msgspec.json.decode(_first_line(), type=ChildOrder)
    threading.Thread(target=_end_with_parent, name="kvferry-parent", daemon=True).start()
    say = _own_output()
    # A worker's own process is its rank 0.
    install(LogSettings(order.name, order.log_level, 0 if order.kind is PartKind.WORKER else None))
    try:
        run_part(order.kind, order.options, lambda url: say(Said(url=url)))
    except KvferryError as error:
        say(Said(error=str(error), is_input=isinstance(error, MENDABLE)))
        return EXIT_FAILED
    return 0


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        # Byte by byte: what follows is for the thread that watches.
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)
        line += byte
    return line


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _own_output() -> Callable[[Said], None]:
    """Keep the way to the parent for ourselves; what libraries print goes to the log."""
    ours = os.dup(1)
    os.dup2(2, 1)

    def say(said: Said) -> None:
        try:
            os.write(ours, msgspec.json.encode(said) + b"\n")
        except BrokenPipeError:
            logging.getLogger(__name__).info("parent-gone")

    return say


if __name__ == "__main__":
    # The engine's thread may be in the middle of a step, which nobody waits for.
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
