"""Proofs of content: has the copy thread sum what is in a room's pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.endpoint.copy_thread import Copier, CopyThread
from kvferry.endpoint.jobs import ProofJob
from kvferry.endpoint.setup import EndpointSetup
from kvferry.ids import Room
from kvferry.memory.checksum.cpu import CellSums
from kvferry.plan.content import ContentView, cell_entries, cells_between, num_chosen
from kvferry.plan.places import PageTable
from kvferry.protocol.events import Event, Prove, Proven

ON_A_GPU = "no kernel sums memory on a GPU yet"


@dataclass(slots=True, eq=False, kw_only=True)
class ContentProofs:
    """Proofs of one endpoint. ``tables_of`` returns the page tables of a room."""

    setup: EndpointSetup
    copier: Copier
    answer: Callable[[Event], None]
    tables_of: Callable[[Room], Mapping[str, PageTable]]

    def prove(self, action: Prove) -> None:
        """Compute sums of a room's pages, and answer ``Proven``, once."""
        if not isinstance(self.copier, CopyThread):
            self.answer(Proven(action.op, None, ON_A_GPU))
            return
        layout = self.setup.identity.layout
        view = ContentView(
            layout,
            layout.rank_shards(self.setup.me.rank),
            self.setup.memory.map,
            self.tables_of(action.room),
        )

        def start() -> CellSums:
            about = action.plan, action.pair, action.request, action.proof
            num_cells = num_chosen(cells_between(*about))
            entries = cell_entries(*about, view)
            return CellSums(action.proof.seed, num_cells, entries, self.setup.addresses)

        self.copier.submit(ProofJob(action, start))

    def proven(self, job: ProofJob) -> None:
        """Answer with the result of a proof, which reads no memory any more."""
        self.answer(Proven(job.action.op, job.result, job.problem))
