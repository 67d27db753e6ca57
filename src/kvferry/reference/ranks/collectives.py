"""The sum over the ranks of one instance.

Ranks are processes of one host and talk through socket pairs made by the driver: a port, even on
loopback, would be open to every user of the machine. The tensors of a GPU pass through host
memory, so that ranks may also share one GPU. Plans and results take the pipes of ``processes.py``.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

Sockets = Mapping[int, socket.socket]
_TIME = struct.Struct("@ll")


class Comm:
    """Sums over the ranks, for one rank's thread; rank 0 has a socket to each other rank.

    Rank 0 adds up what the others send, in rank order, and sends the sum back. With fewer cores
    than ranks this needs fewer context switches than a ring. A connection that is broken, or
    silent for too long, raises ``OSError``.
    """

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._is_lead = 0 not in sockets

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks; works in place."""
        if not self._is_lead:
            self.send(partial, 0)
            self.receive(partial, 0)
            return partial
        part = torch.empty_like(partial)
        for rank in self._sockets:
            self.receive(part, rank)
            partial += part
        for rank in self._sockets:
            self.send(partial, rank)
        return partial

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor's bytes."""
        host = tensor.contiguous().cpu()
        try:
            self._sockets[rank].sendall(_bytes_of(host))
        except BlockingIOError:
            raise _silent(rank) from None

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a contiguous tensor."""
        host = torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor
        view = _bytes_of(host)
        while view:
            try:
                num_bytes = self._sockets[rank].recv_into(view, flags=socket.MSG_WAITALL)
            except BlockingIOError:
                raise _silent(rank) from None
            if not num_bytes:
                raise ConnectionResetError(f"rank {rank} has left")
            view = view[num_bytes:]
        if host is not tensor:
            tensor.copy_(host)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for connection in self._sockets.values():
            connection.close()


def _bytes_of(host: Tensor) -> memoryview:
    return host.view(-1).view(torch.uint8).numpy().data


def _silent(rank: int) -> TimeoutError:
    return TimeoutError(f"rank {rank} does not answer")


def connected(num_ranks: int, lost_s: float) -> list[dict[int, socket.socket]]:
    """Return the sockets of each rank, connected.

    The kernel enforces ``lost_s`` on every wait of rank 0, so that a wait is a single system call.
    The others wait twice as long: rank 0 knows which of them is lost.
    """
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for rank in range(1, num_ranks):
        ends[0][rank], ends[rank][0] = pair = socket.socketpair()
        for end, wait_s in zip(pair, (lost_s, 2 * lost_s), strict=True):
            limit = _TIME.pack(int(wait_s), int(wait_s % 1 * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return ends
