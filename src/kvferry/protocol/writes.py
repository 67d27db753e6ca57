"""The write queue of a source: what may start now, and what an ended write means.

Lanes take turns. A lane waits for a credit, for a local slot, for one of the
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
from kvferry.protocol.lanes import (
    MAX_BLOCKS_PER_WRITE,
    Lane,
    Writing,
    chunk,
    num_expected,
    states,
)
from kvferry.protocol.links import Links
from kvferry.protocol.messages import Credit, Want
from kvferry.protocol.modes import Cuts, Decision, TransferModes
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.slots import EarlyGather, InFlight, LocalSlots
from kvferry.protocol.states import LaneState

# Direct writes of one lane at a time: one under way and one behind it. What is pushed
# meanwhile waits, and becomes one write.
MAX_DIRECT_PER_LANE = 2


class WriteQueue:
    """Queue of the blocks that lanes have to write. It starts writes and takes their ends."""

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
        # Ordered sets: lanes that may have something to write, those that this step has
        # changed, and those that have a credit and wait for a local slot.
        self.ready: dict[Lane, None] = {}
        self._touched: dict[Lane, None] = {}
        self._starved: dict[Lane, None] = {}

    def wake(self, lane: Lane) -> None:
        """Something changed for the lane: look at it when the step is over."""
        self.ready[lane] = None
        self._touched[lane] = None

    # ------------------------------------------------------------ what is to be written

    def prepare(self, lane: Lane, event: Prepare) -> None:
        """These tokens will be pushed: ask for the credits that they need."""
        if lane.is_news(event.tokens):
            self._decide(lane, event, chunk(lane, event.tokens, lane.all_layers))

    def push(self, lane: Lane, event: Push) -> None:
        """Write what a push means for a lane."""
        layers = lane.all_layers if event.layers is None else event.layers
        rows = states(lane, layers) if event.states else []
        known = lane.cuts.pop(event.tokens, None)
        self._decide(lane, event, [*chunk(lane, event.tokens, layers), *rows], known)

    def push_rest(self, lane: Lane, event: Finish) -> None:
        """All is pushed: state rows that did not go with their layers may be read too."""
        gaps = lane.room.rows.gaps(lane.all_layers)
        rows = [row for layers in gaps for row in states(lane, layers)]
        if rows:
            self._decide(lane, event, rows)
        self.wake(lane)

    def _decide(
        self,
        lane: Lane,
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
        decision = Decision(lane, event, asked, cuts)
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
        lane, event = decision.lane, decision.event
        if isinstance(event, Prepare):
            if lane.is_news(event.tokens):
                cuts = {block: cut for block, cut in decision.cuts.items() if cut is not None}
                lane.cuts[event.tokens] = cuts
                lane.expected[event.tokens] = sum(map(len, cuts.values()))
        else:
            num_staged = self._enqueue(lane, decision.cuts)
            if isinstance(event, Push):
                self._meet(lane, event, num_staged)
        self.wake(lane)
        if lane.num_needed > lane.wanted:
            lane.wanted = lane.num_needed
            self._want(lane)

    def _enqueue(self, lane: Lane, cuts: Cuts) -> int:
        """Have blocks written; return how many fragments of them wait for credits."""
        staged: list[Block] = []
        for block, fragments in cuts.items():
            if fragments is None:
                lane.direct.append(block)
            else:
                staged += fragments
        if staged and not lane.awaits_credit:
            lane.waiting_since = self._outbox.now
        lane.staged.extend(staged)
        return len(staged)

    def _meet(self, lane: Lane, push: Push, num_staged: int) -> None:
        """Expect of the rest of a chunk what its first push has shown."""
        tokens = push.tokens
        if push.layers is not None and not lane.expects(tokens):
            lane.expected[tokens] = num_expected(lane, tokens, push.layers, num_staged)
        else:
            lane.met(tokens, num_staged)
        for span in [span for span in lane.expected if not lane.room.lacks_of(lane, span)]:
            del lane.expected[span]

    # ------------------------------------------------------------ credits

    def _want(self, lane: Lane) -> None:
        lane.said_at = self._outbox.now
        self._links.say(lane.link, Want(lane.room.name, lane.generation, lane.wanted))

    def grant(self, lane: Lane, granted: Iterable[Credit]) -> None:
        """Take credits of a target, each once."""
        for credit in granted:
            if credit.serial not in lane.used:
                lane.credit[credit.serial] = credit.slot
        self.wake(lane)

    def repeat(self, lane: Lane) -> None:
        """Ask for credits again, or stop waiting for them."""
        now = self._outbox.now
        if lane.busy_until and now >= lane.busy_until:
            lane.busy_until = 0.0
            self.wake(lane)
        impatient = now >= lane.waiting_since + self._config.credit_patience_s
        if lane.awaits_credit and impatient:
            self._outbox.counts["impatient"] += len(lane.staged) + len(lane.held)
            lane.direct.extend(lane.staged)
            lane.staged.clear()
            self._gather.discard(lane)
            self.wake(lane)
        elif lane.awaits_credit and now >= lane.said_at + self._config.resend_s:
            self._want(lane)

    # ------------------------------------------------------------ writes

    def settle(self) -> Iterable[Lane]:
        """Start what can be started, lanes in turn; return the lanes that this step changed."""
        if not self.ready and not self._touched:
            return ()
        for lane in self._touched:
            if lane.held:
                self._post(lane)
        waiting: dict[Lane, None] = {}
        writes, most = self.inflight.writes, self._config.max_inflight
        while self.ready and len(writes) < most:
            lane = next(iter(self.ready))
            del self.ready[lane]
            if lane.held:
                self._post(lane)
            directly = self._writes_directly(lane)
            if not lane.is_able(self._outbox.now) or not (
                directly or (lane.staged and lane.credit)
            ):
                waiting[lane] = None
            elif directly or self.slots:
                self._start(lane, directly=directly)
                self.ready[lane] = None
            else:
                self._starved[lane] = None
                self._gather.take_back()
        if waiting and self._gather.is_on:
            self.ready |= self._gather.gather_in_turn(waiting)
        touched, self._touched = self._touched, {}
        return touched

    def _post(self, lane: Lane) -> None:
        if self._gather.post(lane):
            self.ready |= self._gather.eager()

    def _writes_directly(self, lane: Lane) -> bool:
        if not lane.direct:
            return False
        direct = sum(self.inflight.writes[op].local_slot is None for op in lane.inflight)
        return direct < MAX_DIRECT_PER_LANE

    def _start(self, lane: Lane, *, directly: bool) -> None:
        """Start one write of the lane, with as much as waits and fits."""
        if directly:
            count = min(len(lane.direct), MAX_BLOCKS_PER_WRITE)
            some = [lane.direct.popleft() for _ in range(count)]
            self._write(Writing(lane, join_layers(lane.transfer.plan.spec, some), None, None))
        else:
            credit = lane.use_credit(self._outbox.now)
            blocks = lane.fill(lane.num_fitting(self._config.local_slot_bytes))
            self._write(Writing(lane, blocks, credit, self.slots.allocate()))

    def _write(self, write: Writing) -> None:
        lane, slot = write.lane, write.credit.slot if write.credit else None
        op = self.inflight.begin(write)
        note = self._links.envelope(lane.link.session, 0, write.note())
        self._outbox.do(Write(op, lane.transfer, write.blocks, note, slot, write.local_slot))

    # ------------------------------------------------------------ ends

    def end(self, op: Op) -> Writing | None:
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
        self.wake(write.lane)
        return write

    def retry(self, write: Writing) -> None:
        """Nothing was submitted. Back-pressure is not death: wait, and try again."""
        lane, credit = write.lane, write.credit
        if write.is_ahead:
            if lane.state is LaneState.SENDING and write.is_taken_back:
                lane.staged.extendleft(reversed(write.blocks))
            elif lane.state is LaneState.SENDING:
                # It was discarded because no credit came.
                lane.direct.extend(write.blocks)
            return
        self._outbox.counts["busy"] += 1
        if lane.state is not LaneState.SENDING:
            return
        lane.busy_until = self._outbox.now + self._config.resend_s / 4
        if credit is None:
            lane.direct.extendleft(reversed(write.blocks))
        else:
            lane.used.discard(credit.serial)
            lane.credit[credit.serial] = credit.slot
            lane.staged.extendleft(reversed(write.blocks))

    def drop(self, lane: Lane) -> None:
        """Let go of everything of a lane that was not submitted."""
        self.modes.drop(lane)
        lane.drop_pending()
        self._gather.discard(lane)

    def is_followed(self, op: Op) -> bool:
        """Whether its lane goes on after that write, so that its end leads to no Close."""
        write = self.inflight.writes.get(op)
        return write is not None and write.credit is not None and write.lane.awaits_credit

    def is_sent(self, lane: Lane) -> bool:
        """Whether everything that was pushed so far is in the target's memory."""
        return lane.idle

    def reads(self, lane: Lane) -> bool:
        """Whether some write of the lane may still read its pages."""
        return bool(lane.inflight)

    def check(self) -> None:
        """Slots and writes add up, and nobody waits for a slot while one is free."""
        self.modes.check()
        self.inflight.check()
        self._gather.check()
        self.slots.check(self.inflight.slots())
