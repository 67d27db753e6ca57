"""A plugin for SGLang that stands in for what its plain PyTorch lacks for data-parallel attention.

A replica that has nothing to compute goes along with no tokens. SGLang asks its attention how long
such a request is, which the one in plain PyTorch does not say, and turns keys of no tokens, which
its rotary positions in plain PyTorch do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NO_TOKENS_LONG = 1


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    batch = "sglang.srt.model_executor.forward_batch_info.ForwardBatch._pad_inputs_to_size"
    rotary = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"
    HookRegistry.register(batch, _say_length, HookType.BEFORE)
    HookRegistry.register(rotary, _turn, HookType.AROUND)


def _say_length(batch: Any, runner: Any, *_: Any, **__: Any) -> None:
    runner.attn_backend.get_cpu_graph_seq_len_fill_value = lambda: NO_TOKENS_LONG


def _turn(
    original: Callable[..., Any], self: Any, positions: Any, *others: Any, **named: Any
) -> Any:
    return original(self, positions, *others, **named) if len(positions) else others[:2]
