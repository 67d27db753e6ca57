"""How the ranks of one instance add up, gather and pass on their tensors.

The ranks of an instance are processes of one host (gloo) or its GPUs (nccl). A
single rank has no peers and calls none of it. Plans and results do not travel
here but through ``ranks.py``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.errors import InputError
from kvferry.serve.model.shard import Shard

MEET_POLL_S = 0.01


class Comm:
    """One rank's connections: the ranks that share its layers, and the stages beside it."""

    def __init__(self, shard: Shard, group: dist.ProcessGroup | None) -> None:
        self._shard = shard
        self._group = group
        self.tp = shard.parallel.tp
        self._first = shard.rank - shard.tp_rank

    def total(self, partial: Tensor) -> Tensor:
        """The sum over the ranks that share these layers, in place; each of them has it."""
        if self.tp == 1:
            return partial
        if partial.is_cuda:
            dist.all_reduce(partial, group=self._group)
            return partial
        return self._total_by_way_of_first(partial)

    def _total_by_way_of_first(self, partial: Tensor) -> Tensor:
        """The sum, in rank order, made by the first rank and handed out.

        On a host with fewer cores than ranks, what counts is how many processes
        have to be scheduled one after another: two here, and two for each rank in
        gloo's ring. With nine ranks on two cores this is five times as fast.
        """
        if self._shard.tp_rank:
            dist.send(partial, self._first)
            dist.recv(partial, self._first)
            return partial
        others = range(self._first + 1, self._first + self.tp)
        parts = [torch.empty_like(partial) for _ in others]
        _finish([dist.P2POp(dist.irecv, part, r) for part, r in zip(parts, others, strict=True)])
        for part in parts:
            partial += part
        _finish([dist.P2POp(dist.isend, partial, r) for r in others])
        return partial

    def join_columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The parts of all ranks side by side, on the first of them; None on the others."""
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
        """Give the activations to the same rank of the next stage."""
        dist.send(hidden.contiguous(), dst=self._shard.rank + self.tp)

    def take_over(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden`` with the activations from the same rank of the stage before."""
        dist.recv(hidden, src=self._shard.rank - self.tp)
        return hidden

    def close(self) -> None:
        """Leave the others. Idempotent."""
        if self._shard.parallel.num_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _finish(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def connect(shard: Shard, device: torch.device, meeting: Path, timeout_s: float) -> Comm:
    """Meet the other ranks at the file ``meeting``. Every rank calls this at the same time."""
    parallel = shard.parallel
    if parallel.num_ranks == 1:
        return Comm(shard, None)
    if dist.is_initialized():
        raise InputError(
            "this process is a rank of another instance already; run one instance a process"
        )
    if device.type == "cpu":
        # An instance lives on one host, so nobody else needs to reach its sockets.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _await_all(meeting, shard.rank, parallel.num_ranks, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=meeting.absolute().as_uri(),
        rank=shard.rank,
        world_size=parallel.num_ranks,
        timeout=timeout,
    )
    stages = [
        dist.new_group(range(stage * parallel.tp, (stage + 1) * parallel.tp), timeout)
        for stage in range(parallel.pp)
    ]
    return Comm(shard, stages[shard.stage])


def _await_all(meeting: Path, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Wait until every rank has come this far.

    torch waits too, but without letting any other thread of the process run: one
    that watches for the driver's end, or that of a user who has changed their mind.
    """
    try:
        meeting.with_name(f"rank-{rank}").touch()
    except FileNotFoundError:
        raise BrokenPipeError("the driver has left, and its folder with it") from None
    others = [meeting.with_name(f"rank-{other}") for other in range(num_ranks)]
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in others):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks came within {timeout_s:g} s")
        time.sleep(MEET_POLL_S)
