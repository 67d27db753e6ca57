"""Helpers of the checksum tests: proofs between ranks of ``moving``, on any device."""

from __future__ import annotations

from collections.abc import Iterator

from moving import Rank

from kvferry.memory.checksum.cpu import CellSums
from kvferry.plan import Plan, RankPair, Request
from kvferry.plan.content import (
    ALL_CELLS,
    CellEntries,
    ContentView,
    ProofRequest,
    cell_entries,
    cells_between,
    num_chosen,
)

FULL = ProofRequest(seed=0x1234_5678_9ABC_DEF0 >> 1, share=ALL_CELLS)


def cells_of(
    plan: Plan, pair: RankPair, request: Request, rank: Rank, proof: ProofRequest = FULL
) -> tuple[int, Iterator[CellEntries]]:
    """Return the number of chosen cells of a pair, and their entries in one rank's pages."""
    layout, side = rank.layout, rank.side
    view = ContentView(layout, layout.rank_shards(rank.rank), side.pools, side.tables)
    num_cells = num_chosen(cells_between(plan, pair, request, proof))
    return num_cells, cell_entries(plan, pair, request, proof, view)


def sums_of(
    plan: Plan, pair: RankPair, request: Request, rank: Rank, proof: ProofRequest = FULL
) -> bytes:
    """Return the sums of a rank's pages in host memory."""
    addresses = [region.ctypes.data for region in rank.regions]
    cells, entries = cells_of(plan, pair, request, rank, proof)
    return CellSums(proof.seed, cells, entries, addresses).finish()
