"""The write queue of a source: what may start now, and what an ended write means.

Lanes take turns. A outbound waits for a credit, for a local slot, for one of the
writes in flight to end, or for a busy transport; it never holds one of these
while it waits for another, except a credit, which its pages already back.

What waits is written together: pushes of a few layers each cost as many writes as the
transport has time for, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.config import ProtocolConfig
from kvferry.ids import Op
from kvferry.plan.plan import Block
from kvferry.protocol.cutting import join_layers
from kvferry.protocol.events import Chosen, Finish, Prepare, Push, Write
from kvferry.protocol.links import Links
from kvferry.protocol.messages import Credit, Want
from kvferry.protocol.modes import Cuts, Decision, TransferModes
from kvferry.protocol.outbound import (
    MAX_BLOCKS_PER_WRITE,
    ActiveWrite,
    OutboundTransfer,
    chunk,
    num_expected,
    states,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.slots import EarlyGather, InFlight, LocalSlots
from kvferry.protocol.states import OutboundState

# Direct writes of one outbound at a time: one under way and one behind it. What is pushed
# meanwhile waits, and becomes one write.
MAX_DIRECT_PER_TRANSFER = 2


class WriteQueue:
    """Queue of the blocks that outbounds have to write. It starts writes and takes their ends."""

    def __init__(
        self,
        config: ProtocolConfig,
        links: Links,
        outbox: Outbox,
        slots: LocalSlots,
        inflight: InFlight,
        gather: EarlyGather,
    ) -> None:
        self.modes = TransferModes(config, outbox)
        self._config = config
        self._links = links
        self._outbox = outbox
        self.slots = slots
        self.inflight = inflight
        self._gather = gather
        # Ordered sets: outbounds that may have something to write, those that this step has
        # changed, and those that have a credit and wait for a local slot.
        self.ready: dict[OutboundTransfer, None] = {}
        self._touched: dict[OutboundTransfer, None] = {}
        self._starved: dict[OutboundTransfer, None] = {}

    def wake(self, outbound: OutboundTransfer) -> None:
        """Something changed for the outbound: look at it when the step is over."""
        self.ready[outbound] = None
        self._touched[outbound] = None

    # ------------------------------------------------------------ what is to be written

    def prepare(self, outbound: OutboundTransfer, event: Prepare) -> None:
        """These tokens will be pushed: ask for the credits that they need."""
        if outbound.is_news(event.tokens):
            self._decide(outbound, event, chunk(outbound, event.tokens, outbound.all_layers))

    def push(self, outbound: OutboundTransfer, event: Push) -> None:
        """Write what a push means for a outbound."""
        layers = outbound.all_layers if event.layers is None else event.layers
        rows = states(outbound, layers) if event.states else []
        known = outbound.cuts.pop(event.tokens, None)
        self._decide(outbound, event, [*chunk(outbound, event.tokens, layers), *rows], known)

    def push_rest(self, outbound: OutboundTransfer, event: Finish) -> None:
        """All is pushed: state rows that did not go with their layers may be read too."""
        gaps = outbound.room.rows.gaps(outbound.all_layers)
        rows = [row for layers in gaps for row in states(outbound, layers)]
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
        """Find out how blocks are to be written.

        ``known``: how some of them are cut. One that goes directly is asked for again, because
        its pages may not have been known before.
        """
        known = known or {}
        cuts: Cuts = {block: known[block] for block in blocks if block in known}
        asked = tuple(block for block in blocks if block not in known)
        decision = Decision(outbound, event, asked, cuts)
        if asked:
            self.modes.ask(decision)
        else:
            self._decided(decision)

    def chosen(self, event: Chosen) -> None:
        """Take the answer to a question about modes."""
        decision = self.modes.decide(event)
        if decision is not None:
            self._decided(decision)

    def _decided(self, decision: Decision) -> None:
        outbound, event = decision.outbound, decision.event
        if isinstance(event, Prepare):
            if outbound.is_news(event.tokens):
                cuts = {block: cut for block, cut in decision.cuts.items() if cut is not None}
                outbound.cuts[event.tokens] = cuts
                outbound.expected[event.tokens] = sum(map(len, cuts.values()))
        else:
            num_staged = self._enqueue(outbound, decision.cuts)
            if isinstance(event, Push):
                self._meet(outbound, event, num_staged)
        self.wake(outbound)
        if outbound.num_needed > outbound.wanted:
            outbound.wanted = outbound.num_needed
            self._want(outbound)

    def _enqueue(self, outbound: OutboundTransfer, cuts: Cuts) -> int:
        """Have blocks written; return how many fragments of them wait for credits."""
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

    def _meet(self, outbound: OutboundTransfer, push: Push, num_staged: int) -> None:
        """Expect of the rest of a chunk what its first push has shown."""
        tokens = push.tokens
        if push.layers is not None and not outbound.expects(tokens):
            outbound.expected[tokens] = num_expected(outbound, tokens, push.layers, num_staged)
        else:
            outbound.met(tokens, num_staged)
        for span in [
            span for span in outbound.expected if not outbound.room.lacks_of(outbound, span)
        ]:
            del outbound.expected[span]

    # ------------------------------------------------------------ credits

    def _want(self, outbound: OutboundTransfer) -> None:
        outbound.said_at = self._outbox.now
        self._links.say(
            outbound.link, Want(outbound.room.name, outbound.generation, outbound.wanted)
        )

    def grant(self, outbound: OutboundTransfer, granted: Iterable[Credit]) -> None:
        """Take credits of a target, each once."""
        for credit in granted:
            if credit.serial not in outbound.used:
                outbound.credit[credit.serial] = credit.slot
        self.wake(outbound)

    def repeat(self, outbound: OutboundTransfer) -> None:
        """Ask for credits again, or stop waiting for them."""
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
        elif outbound.awaits_credit and now >= outbound.said_at + self._config.resend_s:
            self._want(outbound)

    # ------------------------------------------------------------ writes

    def settle(self) -> Iterable[OutboundTransfer]:
        """Start writes that may start, in turn; return the transfers that changed."""
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
            if not outbound.is_able(self._outbox.now) or not (
                directly or (outbound.staged and outbound.credit)
            ):
                waiting[outbound] = None
            elif directly or self.slots:
                self._start(outbound, directly=directly)
                self.ready[outbound] = None
            else:
                self._starved[outbound] = None
                self._gather.take_back()
        if waiting and self._gather.is_on:
            self.ready |= self._gather.gather_in_turn(waiting)
        touched, self._touched = self._touched, {}
        return touched

    def _post(self, outbound: OutboundTransfer) -> None:
        if self._gather.post(outbound):
            self.ready |= self._gather.eager()

    def _writes_directly(self, outbound: OutboundTransfer) -> bool:
        if not outbound.direct:
            return False
        direct = sum(self.inflight.writes[op].local_slot is None for op in outbound.inflight)
        return direct < MAX_DIRECT_PER_TRANSFER

    def _start(self, outbound: OutboundTransfer, *, directly: bool) -> None:
        """Start one write of the outbound, with as much as waits and fits."""
        if directly:
            count = min(len(outbound.direct), MAX_BLOCKS_PER_WRITE)
            some = [outbound.direct.popleft() for _ in range(count)]
            self._write(
                ActiveWrite(outbound, join_layers(outbound.transfer.plan.spec, some), None, None)
            )
        else:
            credit = outbound.use_credit(self._outbox.now)
            blocks = outbound.fill(outbound.num_fitting(self._config.local_slot_bytes))
            self._write(ActiveWrite(outbound, blocks, credit, self.slots.allocate()))

    def _write(self, write: ActiveWrite) -> None:
        outbound, slot = write.outbound, write.credit.slot if write.credit else None
        op = self.inflight.begin(write)
        note = self._links.envelope(outbound.link.session, 0, write.note())
        self._outbox.do(Write(op, outbound.transfer, write.blocks, note, slot, write.local_slot))

    # ------------------------------------------------------------ ends

    def end(self, op: Op) -> ActiveWrite | None:
        """A write reads our memory no longer; None if that was known already."""
        write = self.inflight.end(op)
        if write is None:
            self._outbox.counts["late"] += 1
            return None
        if write.local_slot is not None:
            self.slots.free(write.local_slot)
            self.ready |= self._starved
            self._starved.clear()
        self.ready |= self._gather.eager()
        self.wake(write.outbound)
        return write

    def retry(self, write: ActiveWrite) -> None:
        """Nothing was submitted. Back-pressure is not death: wait, and try again."""
        outbound, credit = write.outbound, write.credit
        if write.is_ahead:
            if outbound.state is OutboundState.SENDING and write.is_taken_back:
                outbound.staged.extendleft(reversed(write.blocks))
            elif outbound.state is OutboundState.SENDING:
                # It was discarded because no credit came.
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
        """Let go of everything of a outbound that was not submitted."""
        self.modes.drop(outbound)
        outbound.drop_pending()
        self._gather.discard(outbound)

    def is_followed(self, op: Op) -> bool:
        """Whether its outbound goes on after that write, so that its end leads to no Close."""
        write = self.inflight.writes.get(op)
        return write is not None and write.credit is not None and write.outbound.awaits_credit

    def is_sent(self, outbound: OutboundTransfer) -> bool:
        """Whether everything that was pushed so far is in the target's memory."""
        return outbound.idle

    def reads(self, outbound: OutboundTransfer) -> bool:
        """Whether some write of the outbound may still read its pages."""
        return bool(outbound.inflight)

    def check(self) -> None:
        """Slots and writes add up, and nobody waits for a slot while one is free."""
        self.modes.check()
        self.inflight.check()
        self._gather.check()
        self.slots.check(self.inflight.slots())
