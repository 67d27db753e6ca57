"""The liveness_port: proof that a process is gone.

Memory that a peer may still write is released only on proof, and silence is no
proof: a stopped process goes on one day. So every endpoint listens on a TCP port
of its own for its whole life, and whoever lost it asks there.

Why a refused connection is proof: the listening socket is the process's, opened
at its start and closed by nothing but its end, and a kernel refuses a connection
exactly when nobody listens. On Linux, a process that ends gives up its memory
(each thread its own hold on it) before its files, so once the port refuses, none
of its threads will touch memory again. A stopped, swapped or busy process still
listens: its kernel takes the connection and nobody answers, which proves nothing.

What this assumes: that the address stays with that machine while the process
lives, and that nothing in between (a proxy, a load balancer, a firewall set to
reject instead of drop) refuses on behalf of the machine. A network card that
writes memory by itself may have its last packets under way for a moment longer;
a transport that uses one waits for them.

A child made by fork without exec keeps the socket open. Then the port stops
answering only when the child has ended as well, which errs on the safe side.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from enum import StrEnum

from kvferry.errors import InputError

Address = tuple[str, int]

MAGIC = b"kvflife1"
ANSWER = struct.Struct(">8sQ")
BACKLOG = 128
# What one call answers at most, so that the owner gets to its other work.
MAX_BATCH = 64


class Liveness(StrEnum):
    """What is known of a process."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class LivenessPort:
    """A port that answers with the incarnation of its owner. Belongs to the owner's thread."""

    def __init__(self, host: str, incarnation: int, port: int = 0) -> None:
        self._answer = ANSWER.pack(MAGIC, incarnation)
        self._socket = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            # A successor may take the port at once; two that live never share one.
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
        """For a poller: readable when somebody asks."""
        return self._socket.fileno()

    def answer(self) -> None:
        """Answer those who asked, up to a limit. Never waits."""
        for _ in range(MAX_BATCH):
            try:
                asker, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:
                # The asker has left already, or there is no free file number just now.
                return
            with asker:
                _reply(asker, self._answer)

    def leave_open(self) -> None:
        """Never say that it is over while the process lives, even if nobody refers to this."""
        self._socket.detach()

    def close(self) -> None:
        """Say that this life is over. Whoever asks from now on takes it for gone."""
        self._socket.close()

    def __repr__(self) -> str:
        return f"<LivenessPort {self.address[0]} port {self.address[1]}>"


def _reply(asker: socket.socket, answer: bytes) -> None:
    try:
        asker.setblocking(False)
        asker.send(answer)
    except OSError:
        # The asker has left, and asks again if it still wants to know.
        return


def probe(address: Address, incarnation: int, timeout_s: float) -> Liveness:
    """Ask whether that life of the process at that address goes on. Waits, never raises."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(_family(address[0]), socket.SOCK_STREAM) as asking:
            asking.settimeout(timeout_s)
            asking.connect(address)
            answer = _read(asking, deadline)
    except ConnectionRefusedError:
        return Liveness.GONE
    except (OSError, OverflowError, InputError):
        return Liveness.UNKNOWN
    return judge(answer, incarnation)


def judge(answer: bytes, incarnation: int) -> Liveness:
    """What an answer says of that life. A stranger's answer says nothing."""
    if len(answer) != ANSWER.size or not answer.startswith(MAGIC):
        return Liveness.UNKNOWN
    answered: int = ANSWER.unpack(answer)[1]
    # Another life holds the port, and no two sockets can.
    return Liveness.ALIVE if answered == incarnation else Liveness.GONE


def _read(asking: socket.socket, deadline: float) -> bytes:
    """An answer and one byte, if so much comes before the deadline."""
    answer = b""
    while len(answer) <= ANSWER.size:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        asking.settimeout(remaining_s)
        part = asking.recv(ANSWER.size + 1 - len(answer))
        if not part:
            break
        answer += part
    return answer


def _family(host: str) -> socket.AddressFamily:
    """Numeric addresses only: a name may stand for several machines, and one that refuses
    would prove nothing about the others."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise InputError(f"a liveness_port needs a resolve_ip address, not {host!r:.200}") from None
    return socket.AF_INET6 if version == 6 else socket.AF_INET
