"""Proofs of content: has the copier sum what is in a room's pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.jobs import ProofJob
from kvferry.endpoint.setup import EndpointSetup
from kvferry.ids import Room
from kvferry.memory.checksum.devices import SumCells, SumsInSteps
from kvferry.plan.content import ContentView, cell_entries, cells_between, num_chosen
from kvferry.plan.places import PageTable
from kvferry.protocol.events import Event, Prove, Proven


@dataclass(slots=True, eq=False, kw_only=True)
class ContentProofs:
    """Proofs of one endpoint. ``tables_of`` returns the page tables of a room."""

    setup: EndpointSetup
    copier: Copier
    sum_cells: SumCells
    answer: Callable[[Event], None]
    tables_of: Callable[[Room], Mapping[str, PageTable]]

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages, and answer ``Proven``, once."""
        layout = self.setup.identity.layout
        view = ContentView(
            layout,
            layout.rank_shards(self.setup.me.rank),
            self.setup.memory.map,
            self.tables_of(action.room),
        )

        def start() -> SumsInSteps:
            about = action.plan, action.pair, action.request, action.proof
            num_cells = num_chosen(cells_between(*about))
            return self.sum_cells(action.proof.seed, num_cells, cell_entries(*about, view))

        self.copier.submit(ProofJob(action, start))

    def proven(self, job: ProofJob) -> None:
        """Answer with the result of a proof, which reads no memory any more."""
        self.answer(Proven(job.action.op, job.result, job.problem))
