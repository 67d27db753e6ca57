"""SGLang plugin that adds what SGLang's PyTorch backends lack on a CPU.

Data-parallel attention: an idle replica takes part in each step with no tokens. SGLang asks the
attention backend for the length of such a request, which the PyTorch one does not define, and its
PyTorch rotary embedding fails for keys of no tokens.

Pages of more than one token: SGLang 0.5.21 allocates them with Triton kernels, which need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sglang
import torch

IDLE_LENGTH = 1
_PAGED = "sglang.srt.mem_cache.allocator.paged"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    batch = "sglang.srt.model_executor.forward_batch_info.ForwardBatch._pad_inputs_to_size"
    rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"
    HookRegistry.register(batch, _define_length, HookType.BEFORE)
    HookRegistry.register(rotary, _rotate, HookType.AROUND)
    if sglang.__version__.startswith("0.5.21"):
        HookRegistry.register(f"{_PAGED}.alloc_extend_kernel", ExtendKernel, HookType.REPLACE)
        HookRegistry.register(f"{_PAGED}.alloc_decode_kernel", DecodeKernel, HookType.REPLACE)


def _define_length(batch: Any, runner: Any, *_: Any, **__: Any) -> None:
    runner.attn_backend.get_cpu_graph_seq_len_fill_value = lambda: IDLE_LENGTH


def _rotate(
    original: Callable[..., Any], self: Any, positions: Any, *others: Any, **named: Any
) -> Any:
    return original(self, positions, *others, **named) if len(positions) else others[:2]


class ExtendKernel:
    """Allocates slots of prompts; called as ``ExtendKernel[grid](...)``, like the Triton kernel."""

    def __class_getitem__(cls, grid: tuple[int]) -> Callable[..., None]:
        return _extend


class DecodeKernel:
    """Allocates a slot per request; called as ``DecodeKernel[grid](...)``."""

    def __class_getitem__(cls, grid: tuple[int]) -> Callable[..., None]:
        return _decode


def _extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    slots: torch.Tensor,
    _: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, slots, page_size, slots.device)


def _decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    slots: torch.Tensor,
    _: int,
    page_size: int,
) -> None:
    """Continue a request's page, or take the next free page if it is full."""
    num_taken = 0
    for request, length in enumerate(seq_lens.tolist()):
        if (length - 1) % page_size:
            slots[request] = last_loc[request] + 1
        else:
            slots[request] = free_pages[num_taken] * page_size
            num_taken += 1
