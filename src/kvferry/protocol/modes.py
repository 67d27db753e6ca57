"""Transfer modes of pushed blocks: which of them go through staging.

The machine asks with a ``Choose`` action, and the endpoint binds the blocks, predicts the cost of
each mode and answers with ``Chosen``. Until then the blocks wait. A late or wrong answer costs
time, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.config import ProtocolConfig
from kvferry.ids import Ticket
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import cut_to_slots
from kvferry.protocol.events import Choose, Chosen, Finish, Outbox, Prepare, Push
from kvferry.protocol.outbound import OutboundTransfer

# Fragments of each block that fit a slot on both sides; None for a block that is written directly.
Cuts = dict[Block, list[Block] | None]


@dataclass(slots=True, eq=False)
class Decision:
    """Blocks of one event and how each is written. The mode of those in ``asked`` is open."""

    outbound: OutboundTransfer
    event: Prepare | Push | Finish
    asked: tuple[Block, ...]
    cuts: Cuts


class TransferModes:
    """Decisions that wait for an answer."""

    def __init__(self, config: ProtocolConfig, outbox: Outbox) -> None:
        self._local_slot_bytes = config.local_slot_bytes
        self._outbox = outbox
        self._waiting: dict[Ticket, Decision] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, decision: Decision) -> None:
        """Ask for the mode of a decision's blocks."""
        self._tickets += 1
        ticket = Ticket(self._tickets)
        self._waiting[ticket] = decision
        decision.outbound.undecided.add(ticket)
        self._outbox.do(Choose(ticket, decision.outbound.transfer, decision.asked))

    def decide(self, event: Chosen) -> Decision | None:
        """Return the decision that an answer completes; None if it was dropped."""
        decision = self._waiting.pop(event.ticket, None)
        if decision is None:
            self._outbox.counts["late"] += 1
            return None
        decision.outbound.undecided.discard(event.ticket)
        for block, staged in zip(decision.asked, event.staged, strict=True):
            decision.cuts[block] = self._cut(decision.outbound, block) if staged else None
        return decision

    def _cut(self, outbound: OutboundTransfer, block: Block) -> list[Block] | None:
        transfer, staging = outbound.transfer, outbound.staging
        if not staging.num_slots:
            return None
        slot_bytes = min(staging.slot_bytes, self._local_slot_bytes)
        return cut_to_slots(transfer.plan, transfer.source, outbound.peer.rank, block, slot_bytes)

    def drop(self, outbound: OutboundTransfer) -> None:
        """Ignore later answers for a transfer."""
        for ticket in outbound.undecided:
            del self._waiting[ticket]
        outbound.undecided.clear()

    def check(self) -> None:
        """Check that every waiting decision is known to its transfer."""
        for ticket, decision in self._waiting.items():
            assert ticket in decision.outbound.undecided, ticket
