"""The kernel in Triton's interpreter, which needs no GPU: run with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import Rank, filled, random_cache
from summing import cells_of, sums_of
from transfers import transfers

from kvferry.memory.checksum.gpu_tables import NUM_KEYS, joined, table_of, tiles_of
from kvferry.plan import Plan, RankPair, Request
from kvferry.plan.content import ALL_CELLS, ProofRequest, chunk_keys

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)

from kvferry.memory.checksum.gpu_kernels import sum_chunks


def interpreted_sums(
    plan: Plan, pair: RankPair, request: Request, rank: Rank, proof: ProofRequest
) -> bytes:
    addresses = [region.ctypes.data for region in rank.regions]
    num_cells, entries = cells_of(plan, pair, request, rank, proof)
    state = torch.zeros(NUM_KEYS + num_cells, dtype=torch.int64)
    state[:NUM_KEYS] = torch.from_numpy(chunk_keys(proof.seed).view(np.int64))
    for each in joined(entries, tiles_of(rank.side.pools, plan.spec, addresses)):
        table = table_of(*each, addresses, lambda size: np.empty(size, np.int64))
        numbers = torch.from_numpy(table.numbers)
        for item in range(table.num_items):
            sum_chunks[table.num_programs,](numbers, state, item, *table.tile)
    return state[NUM_KEYS:].numpy().astype("<i8").tobytes()


@given(transfers(), st.sampled_from([ALL_CELLS, ALL_CELLS // 2]))
@settings(max_examples=25, deadline=None)
def test_the_kernel_computes_the_sums_of_the_cpu(
    transfer: tuple[Plan, Request, int, str], share: int
) -> None:
    plan, request, seed, _ = transfer
    rng = np.random.default_rng(seed)
    for rank in filled(plan.source, random_cache(plan.spec, request.num_tokens, rng), request, rng):
        for target in plan.targets_of(rank.rank):
            about = plan, RankPair(rank.rank, target), request, rank, ProofRequest(seed, share)
            assert interpreted_sums(*about) == sums_of(*about)
