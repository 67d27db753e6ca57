"""An SGLang plugin for a machine without SGLang's compiled kernels and with a single GPU.

With ``KVFERRY_ONE_GPU=1`` and ``--gpu-id-step 0`` all tensor-parallel ranks share the GPU. NCCL
refuses that, so collectives go through the host with gloo.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

_DEVICE_COLLECTIVES = (
    "use_pynccl",
    "use_mscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
)


def register() -> None:
    from sglang.srt.layers import dual_gemm
    from sglang.srt.mem_cache import memory_pool

    # These need cutlass and a compiler.
    dual_gemm.DualGemm._select_mode = lambda self, *args, **kwargs: None
    memory_pool.can_use_store_cache = lambda *args, **kwargs: False
    if os.environ.get("KVFERRY_ONE_GPU") == "1":
        _share_the_gpu()


def _share_the_gpu() -> None:
    import torch
    from sglang.srt.distributed import bootstrap, parallel_state

    for module in (parallel_state, bootstrap):
        module.get_default_distributed_backend = lambda device: "gloo"
    parallel_state._group_coordinator_device = lambda local_rank: torch.device("cuda:0")
    group = parallel_state.GroupCoordinator
    original, signature = group.__init__, inspect.signature(group.__init__)

    def without_device_collectives(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments.update(dict.fromkeys(_DEVICE_COLLECTIVES, False))
        original(*bound.args, **bound.kwargs)

    group.__init__ = without_device_collectives
    group._all_reduce_in_place = _all_reduce_in_place
    group._all_gather_into_tensor = _all_gather_into_tensor
    group.broadcast = _broadcast


def _all_reduce_in_place(self: Any, tensor: Any) -> None:
    import torch.distributed as dist

    own = tensor.float().cpu() if tensor.is_floating_point() else tensor.cpu()
    dist.all_reduce(own, group=self.cpu_group)
    tensor.copy_(own)


def _all_gather_into_tensor(self: Any, output: Any, tensor: Any) -> None:
    import torch
    import torch.distributed as dist

    own = tensor.contiguous().cpu()
    parts = [torch.empty_like(own) for _ in range(self.world_size)]
    # As bytes, because gloo does not know every dtype.
    dist.all_gather([p.view(torch.uint8) for p in parts], own.view(torch.uint8), self.cpu_group)
    output.copy_(torch.cat(parts).view(output.shape))


def _broadcast(self: Any, tensor: Any, src: int = 0) -> Any:
    import torch
    import torch.distributed as dist

    if self.world_size > 1:
        own = tensor.contiguous().cpu()
        dist.broadcast(own.view(torch.uint8), src=self.ranks[src], group=self.cpu_group)
        tensor.copy_(own)
    return tensor
