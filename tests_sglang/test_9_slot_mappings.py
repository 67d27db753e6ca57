"""SGLang's own placement of tokens equals the recorded one, which fills pages in ``tests/``.

With decode context parallelism its allocator hands out slots of pages that are as many times as
large; each rank keeps the slots that are its turn.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from connectors.slot_mappings import NUM_TOKENS, SGLANG, SlotCase
from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan
from sglang.srt.layers.dcp.layout import localize_dcp_indices, maybe_dcp_kernel_indices


def slots_of(case: SlotCase) -> torch.Tensor:
    """Return the allocator's slots of the request, in token order."""
    page = case.page * case.dcp
    tokens = np.arange(NUM_TOKENS)
    return torch.tensor(case.blocks[tokens // page] * page + tokens % page)


@pytest.mark.parametrize("case", SGLANG, ids=str)
def test_recorded_slots_are_those_of_sglang(case: SlotCase) -> None:
    slots = slots_of(case)
    computed = np.stack(
        [localize_dcp_indices(slots, case.dcp, rank).numpy() for rank in range(case.dcp)]
    )
    if not case.path.exists():
        case.record(computed)
    np.testing.assert_array_equal(case.recorded(), computed)
    assert ((computed >= 0).sum(axis=0) == 1).all(), "each token is on one rank"
    for rank, own in enumerate(computed):
        rows = maybe_dcp_kernel_indices(slots, case.dcp, rank).numpy()
        np.testing.assert_array_equal(own[own >= 0], rows)


@pytest.mark.parametrize("case", [case for case in SGLANG if case.dcp > 1], ids=str)
def test_recorded_slots_are_those_of_sglangs_transfer(case: SlotCase) -> None:
    """SGLang's own transfer from one rank writes the same rows."""
    num_pages = -(-NUM_TOKENS // case.page)
    for rank, recorded in enumerate(case.recorded()):
        plan = build_dcp_token_transfer_plan(
            np.arange(num_pages, dtype=np.int32),
            case.blocks.astype(np.int32),
            physical_page_size=case.page,
            dcp_size=case.dcp,
            dcp_rank=rank,
            num_kv_tokens=NUM_TOKENS,
        )
        np.testing.assert_array_equal(plan.target_src_token_indices, np.flatnonzero(recorded >= 0))
        np.testing.assert_array_equal(plan.target_dst_token_indices, recorded[recorded >= 0])
