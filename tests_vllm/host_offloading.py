"""Storage for vLLM's OffloadingConnector on a CPU, which its own storage refuses.

Only the copies are replaced. A copy is made a few engine steps after it was asked for, when vLLM
polls for its end, so that blocks which are reused too early give wrong answers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

NUM_STEPS = 3


class LateCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies of blocks between the caches of one group and host memory."""

    def __init__(self, caches: list[torch.Tensor], num_chunks: int) -> None:
        self._caches = caches
        self._stored = [cache.new_zeros((num_chunks, *cache.shape[1:])) for cache in caches]
        self._jobs: dict[int, tuple[Any, Any, bool]] = {}
        self._left: dict[int, int] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec.block_ids, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec.block_ids, src_spec.block_ids, is_store=False)

    def _submit(self, job_id: int, blocks: Any, chunks: Any, *, is_store: bool) -> bool:
        assert len(blocks) == len(chunks)
        self._jobs[job_id] = (torch.tensor(blocks), torch.tensor(chunks), is_store)
        self._left[job_id] = NUM_STEPS
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id in self._left:
            self._left[job_id] -= 1
        ended = [job_id for job_id, left in self._left.items() if left <= 0]
        for job_id in ended:
            self._copy(job_id)
            del self._left[job_id]
        return [TransferResult(job_id, True) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._copy(job_id)
            self._left[job_id] = 0

    def _copy(self, job_id: int) -> None:
        if job_id not in self._jobs:
            return
        blocks, chunks, is_store = self._jobs.pop(job_id)
        for cache, stored in zip(self._caches, self._stored, strict=True):
            if is_store:
                stored[chunks.long()] = cache[blocks.long()]
            else:
                cache[blocks.long()] = stored[chunks.long()]


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's storage in host memory, with copies that need no GPU."""

    def get_worker(self, kv_caches: Any) -> LateCopies:
        assert self.blocks_per_chunk == len(kv_caches.group_data_refs) == 1
        return LateCopies([each.tensor for each in kv_caches.tensors], self.num_chunks)
