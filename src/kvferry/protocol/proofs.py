"""Proofs of content: sums that a source sends with Close and a target compares before Done.

Each side computes them from its own pages, which it does not release before they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.ids import Op, Peer
from kvferry.plan.bind import RankPair
from kvferry.plan.content import cells_between, describe_cells, num_chosen
from kvferry.protocol.events import Outbox, Prove, Proven
from kvferry.protocol.inbound import InboundTransfer, TargetRoom
from kvferry.protocol.outbound import OutboundTransfer
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import InboundState, OutboundState

SUM_BYTES = 8


class SourceProofs:
    """Sums that a source computes, each for one outbound transfer."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.under_way: dict[Op, OutboundTransfer] = {}
        self._ops = 0

    def begin(self, outbound: OutboundTransfer) -> None:
        """Compute the sums of a finished room, if its target asks for them."""
        transfer = outbound.transfer
        proof, request = transfer.proof, transfer.request
        if proof is None or outbound.state is not OutboundState.SENDING:
            return
        pair = RankPair(transfer.source, transfer.peer.rank)
        if not num_chosen(cells_between(transfer.plan, pair, request, proof)):
            return
        self._ops += 1
        op = Op(self._ops)
        self.under_way[op] = outbound
        outbound.is_proving = True
        self._outbox.do(Prove(op, transfer.room, transfer.plan, pair, request, proof))

    def end(self, event: Proven) -> OutboundTransfer | None:
        """Take the sums of a transfer, and return it; None if it is unknown."""
        outbound = self.under_way.pop(event.op, None)
        if outbound is None:
            self._outbox.counts["late"] += 1
            return None
        outbound.is_proving = False
        outbound.sums = event.sums
        return outbound

    def reads(self, outbound: OutboundTransfer) -> bool:
        """Whether a proof still reads the transfer's pages."""
        return outbound.is_proving

    def check(self) -> None:
        """Check that each transfer knows whether it is being proven."""
        for op, outbound in self.under_way.items():
            assert outbound.is_proving, op


class TargetProofs:
    """Comparisons at a target, each with the sums of one source of a room."""

    def __init__(self, rank: int, outbox: Outbox) -> None:
        self._rank = rank
        self._outbox = outbox
        self.under_way: dict[Op, tuple[TargetRoom, InboundTransfer]] = {}
        self._ops = 0

    def prove(self, room: TargetRoom) -> bool:
        """Start the comparisons that are due; return whether all of the room have succeeded."""
        if room.proof is None:
            return True
        for inbound in room.inbounds.values():
            closed = inbound.state is InboundState.CLOSED
            if closed and not inbound.proof_begun and not room.ledger.missing(inbound.source):
                self._begin(room, inbound)
        return all(inbound.is_proven for inbound in room.inbounds.values())

    def _begin(self, room: TargetRoom, inbound: InboundTransfer) -> None:
        assert room.proof is not None
        inbound.proof_begun = True
        pair, request = RankPair(inbound.source, self._rank), room.wanted.request
        if not num_chosen(cells_between(room.plan, pair, request, room.proof)):
            inbound.is_proven = True
        elif inbound.sums is None:
            # The source could not compute sums.
            self._outbox.counts["unproven"] += 1
            inbound.is_proven = True
        else:
            self._ops += 1
            op = Op(self._ops)
            room.proofs.add(op)
            self.under_way[op] = room, inbound
            self._outbox.do(Prove(op, room.name, room.plan, pair, request, room.proof))

    def end(self, event: Proven) -> Iterator[tuple[TargetRoom, Failure | None]]:
        """Compare sums; yield the room, if it is known, and how its content differs."""
        found = self.under_way.pop(event.op, None)
        if found is None:
            self._outbox.counts["late"] += 1
            return
        room, inbound = found
        room.proofs.discard(event.op)
        failure = self._compare(room, inbound, event)
        inbound.is_proven = failure is None
        yield room, failure

    def _compare(self, room: TargetRoom, inbound: InboundTransfer, event: Proven) -> Failure | None:
        if event.sums is None:
            text = f"the content of {inbound.link.peer} could not be checked: {event.problem}"
            return Failure.of(FailureCode.INTERNAL, text)
        if event.sums == inbound.sums:
            return None
        return Failure.of(FailureCode.CONTENT_CORRUPT, self._difference(room, inbound, event.sums))

    def _difference(self, room: TargetRoom, inbound: InboundTransfer, sums: bytes) -> str:
        assert room.proof is not None
        assert inbound.sums is not None
        peer: Peer = inbound.link.peer
        if len(sums) != len(inbound.sums):
            return (
                f"{peer} sent {len(inbound.sums) // SUM_BYTES} sums, not {len(sums) // SUM_BYTES}"
            )
        pair = RankPair(inbound.source, self._rank)
        cells = cells_between(room.plan, pair, room.wanted.request, room.proof)
        differs = np.frombuffer(sums, "<u8") != np.frombuffer(inbound.sums, "<u8")
        where = describe_cells(cells, differs)
        return f"what has arrived is not what {peer} sent: {where}"

    def reads(self, room: TargetRoom) -> bool:
        """Whether a comparison still reads the room's pages."""
        return bool(room.proofs)

    def check(self) -> None:
        """Check that each comparison is known to its room."""
        for op, (room, _) in self.under_way.items():
            assert op in room.proofs, op
