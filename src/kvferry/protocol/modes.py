"""Transfer modes: which blocks go through staging, asked for by an action.

Whoever answers binds the blocks and predicts what each mode costs; a machine can't. A late or
wrong answer costs time and nothing else: until it comes, the blocks wait, and whatever it says
they are written once. An answer for a outbound that has ended finds no question.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.config import ProtocolConfig
from kvferry.ids import Ticket
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import cut_to_slots
from kvferry.protocol.events import Choose, Chosen, Finish, Prepare, Push
from kvferry.protocol.outbound import OutboundTransfer
from kvferry.protocol.outbox import Outbox

# How each block is written: in fragments that each fit a slot of either side, or directly.
Cuts = dict[Block, list[Block] | None]


@dataclass(slots=True, eq=False)
class Decision:
    """Blocks of a outbound that an event is about, and how each is to be written.

    ``asked`` has those whose mode is not known yet.
    """

    outbound: OutboundTransfer
    event: Prepare | Push | Finish
    asked: tuple[Block, ...]
    cuts: Cuts


class TransferModes:
    """Questions about transfer modes that were not answered yet."""

    def __init__(self, config: ProtocolConfig, outbox: Outbox) -> None:
        self._local_slot_bytes = config.local_slot_bytes
        self._outbox = outbox
        self._waiting: dict[Ticket, Decision] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, decision: Decision) -> None:
        """Ask how the blocks of a decision travel."""
        self._tickets += 1
        ticket = Ticket(self._tickets)
        self._waiting[ticket] = decision
        decision.outbound.undecided.add(ticket)
        self._outbox.do(Choose(ticket, decision.outbound.transfer, decision.asked))

    def decide(self, event: Chosen) -> Decision | None:
        """Take an answer; None if nobody waits for it any more."""
        decision = self._waiting.pop(event.ticket, None)
        if decision is None:
            self._outbox.counts["late"] += 1
            return None
        decision.outbound.undecided.discard(event.ticket)
        for block, staged in zip(decision.asked, event.staged, strict=True):
            decision.cuts[block] = self._cut(decision.outbound, block) if staged else None
        return decision

    def _cut(self, outbound: OutboundTransfer, block: Block) -> list[Block] | None:
        if not outbound.may_stage:
            return None
        slot_bytes = min(outbound.slot_bytes, self._local_slot_bytes)
        transfer = outbound.transfer
        return cut_to_slots(transfer.plan, transfer.source, outbound.peer.rank, block, slot_bytes)

    def drop(self, outbound: OutboundTransfer) -> None:
        """Ignore what is answered for a outbound from now on."""
        for ticket in outbound.undecided:
            del self._waiting[ticket]
        outbound.undecided.clear()

    def check(self) -> None:
        """Every question is known to its outbound."""
        for ticket, decision in self._waiting.items():
            assert ticket in decision.outbound.undecided, ticket
