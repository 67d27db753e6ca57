"""The write queue of a source: starts writes and handles their results.

Outbound transfers take turns. A transfer may wait for a credit, a local slot, one of the writes
in flight, or a busy transport. It never holds one of these while it waits for another, except
for a credit, for which it already holds the pages.

Queued blocks are written together, so that many small pushes need no more writes than the
transport can carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.ids import Op, Ticket
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import cut_to_slots, join_layers
from kvferry.protocol.events import Choose, Chosen, Finish, Outbox, Prepare, Push, Write
from kvferry.protocol.links import Links
from kvferry.protocol.messages import Credit, Want
from kvferry.protocol.outbound import MAX_BLOCKS_PER_WRITE, ActiveWrite, OutboundTransfer
from kvferry.protocol.slots import EarlyGather, InFlight
from kvferry.protocol.states import OutboundState

# Direct writes of one transfer in flight: one active and one queued behind it. Blocks pushed
# meanwhile wait and become one write.
MAX_DIRECT_PER_TRANSFER = 2
# Fragments of each block that fit a slot on both sides; None for a block that is written directly.
Cuts = dict[Block, list[Block] | None]


@dataclass(slots=True, eq=False)
class Decision:
    """Blocks of one event and how each is written. Modes of ``undecided`` are not known yet."""

    outbound: OutboundTransfer
    event: Prepare | Push | Finish
    undecided: tuple[Block, ...]
    cuts: Cuts


class WriteQueue:
    """Queue of the blocks that outbound transfers have to write."""

    def __init__(
        self, links: Links, outbox: Outbox, inflight: InFlight, gather: EarlyGather
    ) -> None:
        # Decisions that wait for an answer.
        self.undecided: dict[Ticket, Decision] = {}
        self._tickets = 0
        self._config = links.config
        self._links = links
        self._outbox = outbox
        self.inflight = inflight
        self._gather = gather
        # Ordered sets of transfers: those that may have something to write, those that this step
        # has changed, and those that have a credit and wait for a local slot.
        self.ready: dict[OutboundTransfer, None] = {}
        self._touched: dict[OutboundTransfer, None] = {}
        self._starved: dict[OutboundTransfer, None] = {}

    def wake(self, outbound: OutboundTransfer) -> None:
        """Mark a transfer as changed. ``settle`` looks at it at the end of the step."""
        self.ready[outbound] = None
        self._touched[outbound] = None

    def prepare(self, outbound: OutboundTransfer, event: Prepare) -> None:
        """Ask for the credits of tokens that will be pushed."""
        if outbound.can_announce(event.tokens):
            self._decide(outbound, event, outbound.chunk(event.tokens, outbound.all_layers))

    def push(self, outbound: OutboundTransfer, event: Push) -> None:
        """Queue the blocks that a push makes available to a transfer."""
        layers = outbound.all_layers if event.layers is None else event.layers
        rows = outbound.state_rows(layers) if event.states else []
        known = outbound.cuts.pop(event.tokens, None)
        self._decide(outbound, event, [*outbound.chunk(event.tokens, layers), *rows], known)

    def push_rest(self, outbound: OutboundTransfer, event: Finish) -> None:
        """Queue the state rows that were not pushed with their layers."""
        if outbound.rows:
            gaps = outbound.room.pushed.rows.gaps(outbound.all_layers)
            rows = [row for layers in gaps for row in outbound.state_rows(layers)]
            if rows:
                self._decide(outbound, event, rows)
        self.wake(outbound)

    def _decide(
        self,
        outbound: OutboundTransfer,
        event: Prepare | Push | Finish,
        blocks: list[Block],
        known: dict[Block, list[Block]] | None = None,
    ) -> None:
        """Decide how blocks are written, or ask for it.

        ``known`` has the fragments of blocks decided earlier. A block that was to be written
        directly is asked for again, because its pages may not have been known before.
        """
        known = known or {}
        cuts: Cuts = {block: known[block] for block in blocks if block in known}
        undecided = tuple(block for block in blocks if block not in known)
        decision = Decision(outbound, event, undecided, cuts)
        if undecided:
            self._tickets += 1
            ticket = Ticket(self._tickets)
            self.undecided[ticket] = decision
            outbound.undecided.add(ticket)
            self._outbox.do(Choose(ticket, outbound.transfer, undecided))
        else:
            self._decided(decision)

    def chosen(self, event: Chosen) -> None:
        """Handle the answer to a ``Choose``."""
        decision = self.undecided.pop(event.ticket, None)
        if decision is None:
            self._outbox.counts["late"] += 1
            return
        outbound = decision.outbound
        outbound.undecided.discard(event.ticket)
        for block, staged in zip(decision.undecided, event.staged, strict=True):
            decision.cuts[block] = self._cut(outbound, block) if staged else None
        self._decided(decision)

    def _cut(self, outbound: OutboundTransfer, block: Block) -> list[Block] | None:
        transfer, staging = outbound.transfer, outbound.staging
        if not staging.num_slots:
            return None
        slot_bytes = min(staging.slot_bytes, self._config.local_slot_bytes)
        return cut_to_slots(transfer.plan, transfer.source, outbound.peer.rank, block, slot_bytes)

    def _decided(self, decision: Decision) -> None:
        outbound, event = decision.outbound, decision.event
        if isinstance(event, Prepare):
            if outbound.can_announce(event.tokens):
                cuts = {block: cut for block, cut in decision.cuts.items() if cut is not None}
                outbound.cuts[event.tokens] = cuts
                outbound.expected[event.tokens] = sum(map(len, cuts.values()))
        else:
            num_staged = self._enqueue(outbound, decision.cuts)
            if isinstance(event, Push):
                outbound.update_expected(event, num_staged)
        self.wake(outbound)
        if outbound.num_needed > outbound.wanted:
            outbound.wanted = outbound.num_needed
            self._want(outbound)

    def _enqueue(self, outbound: OutboundTransfer, cuts: Cuts) -> int:
        """Queue blocks; return the number of fragments that wait for credits."""
        staged: list[Block] = []
        for block, fragments in cuts.items():
            if fragments is None:
                outbound.direct.append(block)
            else:
                staged += fragments
        if staged and not outbound.awaits_credit:
            outbound.waiting_since = self._outbox.now
        outbound.staged.extend(staged)
        return len(staged)

    def _want(self, outbound: OutboundTransfer) -> None:
        outbound.sent_at = self._outbox.now
        want = Want(outbound.room.name, outbound.generation, outbound.wanted)
        self._links.send(outbound.link, want)

    def grant(self, outbound: OutboundTransfer, granted: Iterable[Credit]) -> None:
        """Take the credits of a Grant, ignoring repeated ones."""
        for credit in granted:
            if credit.serial not in outbound.used:
                outbound.credit[credit.serial] = credit.slot
        self.wake(outbound)

    def repeat(self, outbound: OutboundTransfer) -> None:
        """Retry a busy write, repeat a Want, or write directly if credits take too long."""
        now = self._outbox.now
        if outbound.busy_until and now >= outbound.busy_until:
            outbound.busy_until = 0.0
            self.wake(outbound)
        impatient = now >= outbound.waiting_since + self._config.credit_patience_s
        if outbound.awaits_credit and impatient:
            self._outbox.counts["impatient"] += len(outbound.staged) + len(outbound.held)
            outbound.direct.extend(outbound.staged)
            outbound.staged.clear()
            self._gather.discard(outbound)
            self.wake(outbound)
        elif outbound.awaits_credit and now >= outbound.sent_at + self._config.resend_s:
            self._want(outbound)

    def settle(self) -> Iterable[OutboundTransfer]:
        """Start writes round-robin; return the transfers that this step has changed."""
        if not self.ready and not self._touched:
            return ()
        for outbound in self._touched:
            if outbound.held:
                self._post(outbound)
        waiting: dict[OutboundTransfer, None] = {}
        writes, most = self.inflight.writes, self._config.max_inflight
        while self.ready and len(writes) < most:
            outbound = next(iter(self.ready))
            del self.ready[outbound]
            if outbound.held:
                self._post(outbound)
            directly = self._writes_directly(outbound)
            if not outbound.can_write(self._outbox.now) or not (
                directly or (outbound.staged and outbound.credit)
            ):
                waiting[outbound] = None
            elif directly or self.inflight.slots:
                self._start(outbound, directly=directly)
                self.ready[outbound] = None
            else:
                self._starved[outbound] = None
                self._gather.reclaim()
        if waiting and self._gather.is_on:
            self.ready |= self._gather.gather_in_turn(waiting)
        touched, self._touched = self._touched, {}
        return touched

    def _post(self, outbound: OutboundTransfer) -> None:
        if self._gather.post(outbound):
            self.ready |= self._gather.pop_waiting()

    def _writes_directly(self, outbound: OutboundTransfer) -> bool:
        if not outbound.direct:
            return False
        direct = sum(self.inflight.writes[op].local_slot is None for op in outbound.inflight)
        return direct < MAX_DIRECT_PER_TRANSFER

    def _start(self, outbound: OutboundTransfer, *, directly: bool) -> None:
        """Start one write with as many queued blocks as fit."""
        if directly:
            count = min(len(outbound.direct), MAX_BLOCKS_PER_WRITE)
            queued = [outbound.direct.popleft() for _ in range(count)]
            blocks = join_layers(outbound.transfer.plan.spec, queued)
            write = ActiveWrite(outbound, blocks, None, None)
        else:
            credit = outbound.use_credit(self._outbox.now)
            blocks = outbound.take_staged(outbound.num_fitting(self._config.local_slot_bytes))
            write = ActiveWrite(outbound, blocks, credit, self.inflight.slots.allocate())
        op, slot = self.inflight.begin(write), write.credit.slot if write.credit else None
        note = self._links.envelope(outbound.link.session, 0, write.note())
        self._outbox.do(Write(op, outbound.transfer, write.blocks, note, slot, write.local_slot))

    def end(self, op: Op) -> ActiveWrite | None:
        """Remove and return a write that no longer reads local memory; None if it was removed."""
        write = self.inflight.end(op)
        if write is None:
            self._outbox.counts["late"] += 1
            return None
        if write.local_slot is not None:
            self.ready |= self._starved
            self._starved.clear()
        self.ready |= self._gather.pop_waiting()
        self.wake(write.outbound)
        return write

    def retry(self, write: ActiveWrite) -> None:
        """Queue the blocks of a write again that was not submitted, such as under back-pressure."""
        outbound, credit = write.outbound, write.credit
        if write.is_ahead:
            if outbound.state is OutboundState.SENDING and write.is_reclaimed:
                outbound.staged.extendleft(reversed(write.blocks))
            elif outbound.state is OutboundState.SENDING:
                # Discarded because no credit arrived.
                outbound.direct.extend(write.blocks)
            return
        self._outbox.counts["busy"] += 1
        if outbound.state is not OutboundState.SENDING:
            return
        outbound.busy_until = self._outbox.now + self._config.resend_s / 4
        if credit is None:
            outbound.direct.extendleft(reversed(write.blocks))
        else:
            outbound.used.discard(credit.serial)
            outbound.credit[credit.serial] = credit.slot
            outbound.staged.extendleft(reversed(write.blocks))

    def drop(self, outbound: OutboundTransfer) -> None:
        """Drop everything of a failed transfer that was not submitted."""
        for ticket in outbound.undecided:
            del self.undecided[ticket]
        outbound.undecided.clear()
        outbound.direct.clear()
        outbound.staged.clear()
        self._gather.discard(outbound)

    def is_followed(self, op: Op) -> bool:
        """Whether more fragments follow this write, so that its end leads to no Close."""
        write = self.inflight.writes.get(op)
        return write is not None and write.credit is not None and write.outbound.awaits_credit

    def is_sent(self, outbound: OutboundTransfer) -> bool:
        """Whether everything pushed so far is in the target's memory."""
        return outbound.idle

    def reads(self, outbound: OutboundTransfer) -> bool:
        """Whether a write in flight may still read the transfer's pages."""
        return bool(outbound.inflight)

    def check(self) -> None:
        """Check decisions, writes in flight with their slots, and early gathers."""
        for ticket, decision in self.undecided.items():
            assert ticket in decision.outbound.undecided, ticket
        self.inflight.check()
        self._gather.check()
