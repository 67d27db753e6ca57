"""Sockets between the ranks of an instance on one host: Unix sockets in a private folder.

A port, even on loopback, would be open to every user of the machine. Here nobody
but this user can reach the folder, and once the ranks have met nobody listens.

Each rank connects to the peers below it and is connected to by those above. Bytes
have no frame: both ends know what comes next. Belongs to the rank's own thread.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from numpy import uint8
from numpy.typing import NDArray

from kvferry import InputError

MEET_POLL_S = 0.01
_RANK = struct.Struct("=I")
_TIME = struct.Struct("@ll")

Bytes = NDArray[uint8]


class RankSockets:
    """One connection for each peer. What breaks or takes too long is an ``OSError``."""

    def __init__(self, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self._sockets = sockets
        limit = _TIME.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for connection in sockets.values():
            # The kernel keeps the time: a wait is one call.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: Bytes, peer: int) -> None:
        """All of it."""
        self._sockets[peer].sendall(data.data)

    def receive(self, data: Bytes, peer: int) -> None:
        """Fill the whole array."""
        view, connection = data.data, self._sockets[peer]
        while view:
            num_bytes = connection.recv_into(view, flags=socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError(f"rank {peer} has left")
            view = view[num_bytes:]

    def close(self) -> None:
        """Leave the others. Idempotent."""
        for connection in self._sockets.values():
            connection.close()


def peers_of(rank: int, tp: int, pp: int) -> set[int]:
    """Whom a rank talks to: the first of its stage, or all of it; and its like beside it."""
    first = rank - rank % tp
    mates = {first} if rank != first else set(range(first + 1, first + tp))
    beside = {rank - tp, rank + tp} & set(range(tp * pp))
    return mates | beside


def meet(folder: Path, rank: int, peers: Collection[int], timeout_s: float) -> RankSockets:
    """Connect with every peer. They call this at about the same time."""
    deadline = time.monotonic() + timeout_s
    sockets: dict[int, socket.socket] = {}
    above = {peer for peer in peers if peer > rank}
    try:
        with _listening(_place(folder, rank), len(above)) as listener:
            for peer in set(peers) - above:
                sockets[peer] = _connected(_place(folder, peer), rank, deadline)
            while not above <= sockets.keys():
                connection, peer = _accepted(listener, deadline)
                sockets[peer] = connection
        return RankSockets(sockets, timeout_s)
    except TimeoutError:
        _close(sockets)
        raise RuntimeError(f"not all ranks came within {timeout_s:g} s") from None
    except BaseException:
        _close(sockets)
        raise


def _close(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()


def _place(folder: Path, rank: int) -> str:
    return str(folder / str(rank))


@contextlib.contextmanager
def _listening(place: str, backlog: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(place)
        except FileNotFoundError:
            raise BrokenPipeError("the driver has left, and its folder with it") from None
        except OSError as error:
            raise InputError(
                f"the ranks can't meet at {place} ({error}); set TMPDIR to a folder with a short "
                f"name that this user can write to"
            ) from None
        listener.listen(backlog)
        yield listener
    Path(place).unlink(missing_ok=True)


def _connected(place: str, rank: int, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(place)
            connection.sendall(_RANK.pack(rank))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            # It is not there yet, or binds just now.
            if not Path(place).parent.exists():
                connection.close()
                raise BrokenPipeError("the driver has left, and its folder with it") from None
            if time.monotonic() > deadline:
                connection.close()
                raise TimeoutError from None
            time.sleep(MEET_POLL_S)


def _accepted(listener: socket.socket, deadline: float) -> tuple[socket.socket, int]:
    listener.settimeout(max(MEET_POLL_S, deadline - time.monotonic()))
    connection, _ = listener.accept()
    connection.settimeout(max(MEET_POLL_S, deadline - time.monotonic()))
    data = connection.recv(_RANK.size, socket.MSG_WAITALL)
    if len(data) < _RANK.size:
        connection.close()
        raise RuntimeError("a rank left while the ranks met")
    (peer,) = _RANK.unpack(data)
    return connection, int(peer)
