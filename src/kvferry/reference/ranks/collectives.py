"""Collectives between the ranks of one instance: sum, gather, and send to the next stage.

CPU ranks are processes of one host and talk through socket pairs made by the driver: a port,
even on loopback, would be open to every user of the machine. GPU ranks use NCCL.
Plans and results do not travel here but through the pipes of ``processes.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from numpy import uint8
from numpy.typing import NDArray
from torch import Tensor

from kvferry import InputError
from kvferry.reference.models.shard import ModelShard

_TIME = struct.Struct("@ll")


class RankLinks(NamedTuple):
    """How a rank reaches the others: its sockets, and a folder where NCCL's ranks meet."""

    ends: Mapping[int, Connection]
    folder: Path
    timeout_s: float


class Comm:
    """Collectives of ranks that are processes of one host.

    The first rank of a stage adds up what the others send, in rank order, and sends the sum
    back. With fewer cores than ranks this needs fewer context switches than a ring.
    """

    def __init__(self, shard: ModelShard, sockets: RankSockets) -> None:
        self._shard = shard
        self._sockets = sockets
        self.tp = shard.parallel.tp
        self._first = shard.rank - shard.tp_rank
        self._others = range(self._first + 1, self._first + self.tp)

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks that share these layers; works in place."""
        if self.tp == 1:
            return partial
        data = _bytes_of(partial)
        if self._shard.tp_rank:
            self._sockets.send(data, self._first)
            self._sockets.receive(data, self._first)
            return partial
        part = torch.empty_like(partial)
        for other in self._others:
            self._sockets.receive(_bytes_of(part), other)
            partial += part
        for other in self._others:
            self._sockets.send(data, other)
        return partial

    def join_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the parts of all ranks side by side on the first rank, None elsewhere."""
        if self.tp == 1:
            return part
        if self._shard.tp_rank:
            self._sockets.send(_bytes_of(part.contiguous()), self._first)
            return None
        parts = [part, *(part.new_empty(part.shape[0], width) for width in widths[1:])]
        for other, theirs in zip(self._others, parts[1:], strict=True):
            self._sockets.receive(_bytes_of(theirs), other)
        return torch.cat(parts, dim=1)

    def pass_on(self, hidden: Tensor) -> None:
        """Send the activations to the same rank of the next stage."""
        self._sockets.send(_bytes_of(hidden.contiguous()), self._shard.rank + self.tp)

    def take_over(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden`` with the activations from the same rank of the previous stage."""
        self._sockets.receive(_bytes_of(hidden), self._shard.rank - self.tp)
        return hidden

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._sockets.close()


def _bytes_of(tensor: Tensor) -> NDArray[uint8]:
    assert tensor.is_contiguous(), "a copy would be filled in its place"
    return tensor.view(-1).view(torch.uint8).numpy()


class GpuComm(Comm):
    """Collectives of ranks that have a GPU each, by NCCL; ``group`` is the rank's stage."""

    def __init__(
        self, shard: ModelShard, sockets: RankSockets, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(shard, sockets)
        self._group = group

    def total(self, partial: Tensor) -> Tensor:
        """See the base class."""
        if self.tp > 1:
            dist.all_reduce(partial, group=self._group)
        return partial

    def join_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See the base class."""
        if self.tp == 1:
            return part
        # NCCL gathers parts of equal width only, so pad narrow ones.
        padded = part.new_zeros(part.shape[0], max(widths))
        padded[:, : part.shape[1]] = part
        if self._shard.tp_rank:
            dist.gather(padded, dst=self._first, group=self._group)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=self._first, group=self._group)
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1)

    def pass_on(self, hidden: Tensor) -> None:
        """See the base class."""
        dist.send(hidden.contiguous(), dst=self._shard.rank + self.tp)

    def take_over(self, hidden: Tensor) -> Tensor:
        """See the base class."""
        dist.recv(hidden, src=self._shard.rank - self.tp)
        return hidden

    def close(self) -> None:
        """See the base class."""
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(shard: ModelShard, device: torch.device, links: RankLinks, lost_s: float) -> Comm:
    """Return the collectives of a rank; on GPUs every rank calls this at the same time."""
    parallel = shard.parallel
    sockets = RankSockets(links.ends, lost_s)
    if parallel.num_ranks == 1 or device.type == "cpu":
        return Comm(shard, sockets)
    if dist.is_initialized():
        raise InputError(
            "this process is a rank of another instance already; run one instance a process"
        )
    timeout = timedelta(seconds=links.timeout_s)
    dist.init_process_group(
        "nccl",
        init_method=(links.folder / "nccl").absolute().as_uri(),
        rank=shard.rank,
        world_size=parallel.num_ranks,
        timeout=timeout,
    )
    stages = [
        dist.new_group(range(stage * parallel.tp, (stage + 1) * parallel.tp), timeout)
        for stage in range(parallel.pp)
    ]
    return GpuComm(shard, sockets, stages[shard.stage])


# ---------------------------------------------------------------- Unix sockets


class RankSockets:
    """One connected Unix socket per peer, for the rank's own thread. Bytes have no frame.

    A broken connection, or one silent for ``lost_s``, raises ``OSError``.
    """

    def __init__(self, ends: Mapping[int, Connection], lost_s: float) -> None:
        self._sockets = {peer: socket.socket(fileno=os.dup(c.fileno())) for peer, c in ends.items()}
        self._lost_s = lost_s
        limit = _TIME.pack(int(lost_s), int(lost_s % 1 * 1e6))
        for end in ends.values():
            end.close()
        for connection in self._sockets.values():
            # The kernel enforces the timeout, so that a wait is a single system call.
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, data: NDArray[uint8], peer: int) -> None:
        """Send the whole array."""
        with self._timeout_of(peer):
            self._sockets[peer].sendall(data.data)

    def receive(self, data: NDArray[uint8], peer: int) -> None:
        """Fill the whole array."""
        view, connection = data.data, self._sockets[peer]
        while view:
            with self._timeout_of(peer):
                num_bytes = connection.recv_into(view, flags=socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionResetError(f"rank {peer} has left")
            view = view[num_bytes:]

    @contextlib.contextmanager
    def _timeout_of(self, peer: int) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise TimeoutError(f"rank {peer} has not answered for {self._lost_s:g} s") from None

    def close(self) -> None:
        """Disconnect from every peer. Idempotent."""
        for connection in self._sockets.values():
            connection.close()


def peers_of(rank: int, tp: int, pp: int) -> set[int]:
    """Return the ranks that a rank exchanges tensors with: in its stage, and beside it."""
    first = rank - rank % tp
    mates = {first} if rank != first else set(range(first + 1, first + tp))
    beside = {rank - tp, rank + tp} & set(range(tp * pp))
    return mates | beside


def connected_pairs(tp: int, pp: int) -> dict[int, dict[int, Connection]]:
    """Return connected socket pairs: for each rank, its end to each of its peers."""
    ends: dict[int, dict[int, Connection]] = {rank: {} for rank in range(tp * pp)}
    for rank, own in ends.items():
        for peer in peers_of(rank, tp, pp) - own.keys():
            own[peer], ends[peer][rank] = multiprocessing.Pipe()
    return ends
