"""Collectives: how the ranks of one instance add up, gather and pass on their tensors.

The ranks of an instance are processes of one host, which talk through Unix sockets
(``rank_sockets.py``), or its GPUs, which use nccl. A single rank has no peers. Plans
and results do not travel here but through ``ranks.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry import InputError
from kvferry.reference.models.compute.shard import Shard
from kvferry.reference.ranks.sockets import MEET_POLL_S, Bytes, RankSockets, meet, peers_of


class Comm:
    """One rank's connections: the ranks that share its layers, and the stages beside it.

    This one is for a rank that has no peers.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.tp = shard.parallel.tp
        self._first = shard.rank - shard.tp_rank

    def total(self, partial: Tensor) -> Tensor:
        """The sum over the ranks that share these layers, in place; each of them has it."""
        return partial

    def join_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The parts of all ranks side by side, on the first of them; None on the others."""
        return part

    def pass_on(self, hidden: Tensor) -> None:
        """Give the activations to the same rank of the next stage."""

    def take_over(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden`` with the activations from the same rank of the stage before."""
        return hidden

    def close(self) -> None:
        """Leave the others. Idempotent."""


class HostComm(Comm):
    """Ranks that are processes of one host.

    The first rank of a stage adds up what the others send it, in rank order, and hands
    the sum out. On a host with fewer cores than ranks, what counts is how many
    processes have to be scheduled one after another: two here, and two for each rank
    in a ring.
    """

    def __init__(self, shard: Shard, sockets: RankSockets) -> None:
        super().__init__(shard)
        self._sockets = sockets
        self._others = range(self._first + 1, self._first + self.tp)

    def total(self, partial: Tensor) -> Tensor:
        """See the base class."""
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
        """See the base class."""
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
        """See the base class."""
        self._sockets.send(_bytes_of(hidden.contiguous()), self._shard.rank + self.tp)

    def take_over(self, hidden: Tensor) -> Tensor:
        """See the base class."""
        self._sockets.receive(_bytes_of(hidden), self._shard.rank - self.tp)
        return hidden

    def close(self) -> None:
        """See the base class."""
        self._sockets.close()


def _bytes_of(tensor: Tensor) -> Bytes:
    """A tensor's memory. It must lie in one piece, or writing to this would not write there."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy()


class GpuComm(Comm):
    """Ranks that have a GPU each."""

    def __init__(self, shard: Shard, group: dist.ProcessGroup | None) -> None:
        super().__init__(shard)
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
        # The parts must be of equal width to travel, so narrow ones are padded.
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
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(shard: Shard, device: torch.device, folder: Path, timeout_s: float) -> Comm:
    """Meet the other ranks in ``folder``. Every rank calls this at the same time."""
    parallel = shard.parallel
    if parallel.num_ranks == 1:
        return Comm(shard)
    if device.type == "cpu":
        peers = peers_of(shard.rank, parallel.tp, parallel.pp)
        return HostComm(shard, meet(folder, shard.rank, peers, timeout_s))
    return _gpu_comm(shard, folder, timeout_s)


def _gpu_comm(shard: Shard, folder: Path, timeout_s: float) -> GpuComm:
    parallel = shard.parallel
    if dist.is_initialized():
        raise InputError(
            "this process is a rank of another instance already; run one instance a process"
        )
    _await_all(folder, shard.rank, parallel.num_ranks, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl",
        init_method=(folder / "meeting").absolute().as_uri(),
        rank=shard.rank,
        world_size=parallel.num_ranks,
        timeout=timeout,
    )
    stages = [
        dist.new_group(range(stage * parallel.tp, (stage + 1) * parallel.tp), timeout)
        for stage in range(parallel.pp)
    ]
    return GpuComm(shard, stages[shard.stage])


def _await_all(folder: Path, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Wait until every rank has come this far.

    torch waits too, but without letting any other thread of the process run: one
    that watches for the driver's end, or that of a user who has changed their mind.
    """
    try:
        (folder / f"rank-{rank}").touch()
    except FileNotFoundError:
        raise BrokenPipeError("the driver has left, and its folder with it") from None
    others = [folder / f"rank-{other}" for other in range(num_ranks)]
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in others):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks came within {timeout_s:g} s")
        time.sleep(MEET_POLL_S)
