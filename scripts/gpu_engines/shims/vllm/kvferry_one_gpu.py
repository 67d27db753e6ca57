"""A vLLM plugin that runs all tensor-parallel ranks on one GPU, for tests of a single-GPU machine.

NCCL refuses two ranks on one GPU, so collectives go through the host with gloo. It is active only
with ``KVFERRY_ONE_GPU=1``.
"""

from __future__ import annotations

import os
from typing import Any

NUM_RANKS = 2


def register() -> None:
    if os.environ.get("KVFERRY_ONE_GPU") != "1":
        return
    import torch
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.platforms import cuda

    for platform in (cuda.CudaPlatformBase, cuda.CudaPlatform):
        platform.dist_backend = "gloo"
        platform.device_count = classmethod(lambda cls: NUM_RANKS)
        platform.logical_device_id_to_visible_device_id = classmethod(lambda cls, device_id: 0)
        platform.device_id_to_physical_device_id = classmethod(lambda cls, device_id: 0)
    # vLLM compares local ranks with it.
    torch.accelerator.device_count = lambda: NUM_RANKS
    CudaCommunicator.all_reduce = _all_reduce
    CudaCommunicator.all_gather = _all_gather
    CudaCommunicator.gather = _gather
    CudaCommunicator.broadcast = _broadcast


def _parts(group: Any, own: Any) -> list[Any]:
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(parts, own, group=group.cpu_group)
    return parts


def _all_reduce(self: Any, input_: Any) -> Any:
    """Sum in float32 and in the same order on every rank."""
    total = sum(_parts(self, input_.detach().float().cpu().contiguous()))
    return total.to(input_.device, input_.dtype)


def _all_gather(self: Any, input_: Any, dim: int = -1) -> Any:
    import torch

    parts = _parts(self, input_.detach().cpu().contiguous())
    return torch.cat(parts, dim % input_.dim()).to(input_.device)


def _gather(self: Any, input_: Any, dst: int = 0, dim: int = -1) -> Any:
    gathered = _all_gather(self, input_, dim)
    return gathered if self.rank_in_group == dst else None


def _broadcast(self: Any, tensor: Any, src: int = 0) -> Any:
    import torch.distributed as dist

    own = tensor.detach().cpu().contiguous()
    dist.broadcast(own, self.ranks[src], self.cpu_group)
    tensor.copy_(own)
    return tensor
