"""vLLM's own slot mappings equal the recorded ones, from which the tests of ``tests/`` fill pages.

vLLM's kernels run in Triton's interpreter, because its CPU backend has no context parallelism.
"""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# Read when Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import triton
    import triton.language as tl
    from vllm.v1.attention.backends.mla import compressor_utils
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID
    from vllm.v1.worker import block_table
    from vllm.v1.worker.gpu import block_table as gpu_block_table

from connectors.slot_mappings import NUM_TOKENS, VLLM, VLLM_GROUPS, SlotCase, Slots

Runner = Callable[[SlotCase, int], Slots]


def interpreted(function: Any, **more: Any) -> Any:
    """Return a kernel of vLLM for the interpreter: vLLM does not compile it on a CPU."""
    names = {**function.__globals__, "tl": tl, "triton": triton, **more}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copy)


def by_first_runner(case: SlotCase, rank: int) -> Slots:
    """Return a rank's slots as the first model runner computes them."""
    kernel = interpreted(block_table.ComputeSlotMappingKernel.kernel)
    blocks = torch.tensor(case.blocks, dtype=torch.int32)[None]
    slots = torch.empty(NUM_TOKENS, dtype=torch.int64)
    kernel[(2,)](
        *(NUM_TOKENS, NUM_TOKENS, torch.tensor([0, NUM_TOKENS], dtype=torch.int32)),
        *(torch.arange(NUM_TOKENS), blocks, blocks.stride(0), slots),
        KV_CACHE_BLOCK_SIZE=case.page,
        TOTAL_CP_WORLD_SIZE=case.dcp,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=case.interleave,
        PAD_ID=PAD_SLOT_ID,
        BLOCK_SIZE=1024,
    )
    return slots.numpy()


def by_second_runner(case: SlotCase, rank: int) -> Slots:
    """Return a rank's slots as the second model runner computes them."""
    load_ptr = interpreted(gpu_block_table._load_ptr)
    kernel = interpreted(gpu_block_table._compute_slot_mappings_kernel, _load_ptr=load_ptr)
    blocks = torch.tensor(case.blocks, dtype=torch.int32)[None]
    slots = torch.empty((1, NUM_TOKENS), dtype=torch.int64)
    kernel[(1, 2)](
        *(NUM_TOKENS, torch.zeros(1, dtype=torch.int32)),
        *(torch.tensor([0, NUM_TOKENS], dtype=torch.int32), torch.arange(NUM_TOKENS)),
        torch.tensor([blocks.data_ptr()], dtype=torch.uint64),
        *(torch.tensor([blocks.stride(0)]), torch.tensor([case.page], dtype=torch.int32)),
        *(torch.tensor([True]), torch.tensor([True]), slots, slots.stride(0), rank),
        CP_SIZE=case.dcp,
        CP_INTERLEAVE=case.interleave,
        PAD_ID=PAD_SLOT_ID,
        TRITON_BLOCK_SIZE=1024,
    )
    return slots[0].numpy()


def by_compressor(case: SlotCase, rank: int) -> Slots:
    """Return a rank's slots of entries that stand for several tokens."""
    kernel = interpreted(compressor_utils.CompressedSlotMappingKernel.kernel)
    blocks = torch.tensor(case.blocks, dtype=torch.int32)[None]
    slots = torch.full((NUM_TOKENS,), PAD_SLOT_ID, dtype=torch.int64)
    kernel[(1,)](
        *(slots, torch.from_numpy(by_first_runner(case, rank))),
        *(torch.tensor([0, NUM_TOKENS], dtype=torch.int32), torch.tensor([NUM_TOKENS])),
        *(blocks, blocks.stride(0), case.page // case.ratio, case.dcp, case.interleave),
        COMPRESS_RATIO=case.ratio,
        PAD_ID=PAD_SLOT_ID,
        TRITON_BLOCK_SIZE=1024,
    )
    return slots.numpy()


# Triton's interpreter can't run the second runner's kernel with DCP: it loads booleans as bytes.
CASES: list[tuple[Runner, SlotCase]] = [
    *((by_first_runner, case) for case in VLLM),
    *((by_second_runner, case) for case in VLLM if case.dcp == 1),
    *((by_first_runner, case) for case in VLLM_GROUPS if case.ratio == 1),
    *((by_second_runner, case) for case in VLLM_GROUPS if case.ratio == 1),
    *((by_compressor, case) for case in VLLM_GROUPS if case.ratio > 1),
]


@pytest.mark.parametrize(("runner", "case"), CASES, ids=str)
def test_recorded_slots_are_those_of_vllm(runner: Runner, case: SlotCase) -> None:
    computed = np.stack([runner(case, rank) for rank in range(case.dcp)])
    if not case.path.exists():
        case.record(computed)
    np.testing.assert_array_equal(case.recorded(), computed)
    has_entry = (np.arange(NUM_TOKENS) + 1) % case.ratio == 0
    assert ((computed >= 0).sum(axis=0) == has_entry).all(), "each entry is on one rank"
