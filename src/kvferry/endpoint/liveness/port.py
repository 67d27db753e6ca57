"""The liveness port: proof that a process is gone.

Memory that a peer may still write is released only on proof, and silence proves nothing: a
stopped process may resume at any time. So each endpoint listens on a TCP port for its whole
life, and a peer that has lost contact probes this port.

A refused connection is proof because the listening socket belongs to the process: it opens at
start-up, only the end of the process closes it, and the kernel refuses a connection exactly if
nobody listens. On Linux, an ending process gives up its memory (each thread its own reference)
before its files, so once the port refuses, no thread of it touches memory again. A stopped,
swapped or busy process still listens: its kernel accepts the connection and nobody answers, which
proves nothing.

Assumptions: the address stays with that machine while the process lives, and nothing in between
(a proxy, a load balancer, a firewall set to reject instead of drop) refuses on behalf of the
machine. A network card that writes memory by itself may have packets in flight for a moment
longer; transports that use one wait for them.

A child made by fork without exec keeps the socket open. The port then refuses only after the child
has ended as well, which is the safe direction.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from contextlib import suppress
from enum import StrEnum

from kvferry.errors import InputError

Address = tuple[str, int]

MAGIC = b"kvflife1"
ANSWER = struct.Struct(">8sQ")
BACKLOG = 128
# Probes that one call answers, so that the loop gets to its other work.
MAX_BATCH = 64


class Liveness(StrEnum):
    """Result of a probe."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class LivenessPort:
    """Port that answers probes with this endpoint's incarnation. For the loop thread."""

    def __init__(self, host: str, incarnation: int, port: int = 0) -> None:
        self._answer = ANSWER.pack(MAGIC, incarnation)
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            # A successor may bind the port at once. Two live processes never share it.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setblocking(False)
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise InputError(
                f"cannot listen on {host} port {port} ({error}); "
                f"choose another address, or port 0 for any"
            ) from None
        self.address: Address = self._socket.getsockname()[:2]

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when a probe waits."""
        return self._socket.fileno()

    def answer(self) -> None:
        """Answer waiting probes, up to a limit. Never blocks."""
        for _ in range(MAX_BATCH):
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # None waits, it has left already, or the process is out of file descriptors.
                return
            # An error: the other side has left. It probes again if it still needs to know.
            with connection, suppress(OSError):
                connection.setblocking(False)
                connection.send(self._answer)

    def leave_open(self) -> None:
        """Keep listening until the process ends, even if this object is garbage-collected."""
        self._socket.detach()

    def close(self) -> None:
        """Stop listening: from now on, peers take this incarnation for dead."""
        self._socket.close()


def probe(address: Address, incarnation: int, timeout_s: float) -> Liveness:
    """Return whether that incarnation of the process at ``address`` is alive. Blocks."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(_family(address[0]), socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address)
            answer = _read(connection, deadline)
    except ConnectionRefusedError:
        return Liveness.GONE
    except (OSError, OverflowError, InputError):
        return Liveness.UNKNOWN
    return judge(answer, incarnation)


def judge(answer: bytes, incarnation: int) -> Liveness:
    """Return what an answer proves. An answer that is not from kvferry proves nothing."""
    if len(answer) != ANSWER.size or not answer.startswith(MAGIC):
        return Liveness.UNKNOWN
    answered: int = ANSWER.unpack(answer)[1]
    # If another incarnation holds the port, the one asked for is dead: they cannot share it.
    return Liveness.ALIVE if answered == incarnation else Liveness.GONE


def _read(connection: socket.socket, deadline: float) -> bytes:
    """Read until the end of the stream, or one byte more than an answer has."""
    answer = b""
    while len(answer) <= ANSWER.size:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        connection.settimeout(remaining_s)
        part = connection.recv(ANSWER.size + 1 - len(answer))
        if not part:
            break
        answer += part
    return answer


def _family(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address.

    A name is refused: it may stand for several machines, and a refusal by one of them proves
    nothing about the others.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise InputError(f"a liveness port needs a numeric address, not {host!r:.200}") from None
    return socket.AF_INET6 if version == 6 else socket.AF_INET
