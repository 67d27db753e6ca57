"""Deliberately broken rules of pulls, at the holder and at the instance that asks."""

# The methods are documented where they are overridden from.
# ruff: noqa: D102
from __future__ import annotations

from kvferry.ids import Room, Serial
from kvferry.protocol.asks import Asks
from kvferry.protocol.inbound import InboundTransfer, InboundTransfers
from kvferry.protocol.links import Link
from kvferry.protocol.messages import Ask
from kvferry.protocol.outbound import SourceRoom
from kvferry.protocol.states import InboundState
from kvferry.protocol.target import TargetMachine
from kvferry.testing.sim.breaks import broken_rule, machine, source_part, target_part
from kvferry.testing.sim.engines import SourceNode
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.memory import SimAllocation


@broken_rule(source_part("asks"))
class AnswerEachAsk(Asks):
    """Each rank that asks gets an answer of its own."""

    def ask(self, link: Link, ask: Ask) -> None:
        known = self.rooms.get(ask.room)
        if known is not None and link not in known.askers:
            del self.rooms[ask.room]
        super().ask(link, ask)


@broken_rule(source_part("asks"))
class KeepAnswers(Asks):
    """The answers of a holder are kept for ever."""

    def expired(self) -> list[Room]:
        return []


@broken_rule(source_part("asks"), one_sided=0.3)
class CloseForSomeRanks(Asks):
    """A rank may be done with an answer that another rank will not get."""

    def awaits_targets(self, room: SourceRoom) -> bool:
        return False


@broken_rule(source_part("asks"), one_sided=0.3)
class PinForLong(Asks):
    """A prefix stays pinned although some rank does not claim it."""

    def expired(self) -> list[Room]:
        super().expired()
        return []


@broken_rule(machine("source_node"))
class UnpinEarly(SourceNode):
    """A holder evicts a prefix that it has pinned."""

    def start_in(self, job: SimJob, allocation: SimAllocation) -> None:
        super().start_in(job, allocation)
        if job.chain is not None:
            self.world.at(0.012, lambda: self.memory.overwrite(allocation))


@broken_rule(machine("target"))
class IgnoreTheAnswer(TargetMachine):
    """A target waits for all that it asked for, whatever the answer."""

    def _on_length(self, inbound: InboundTransfer | None, num_tokens: int) -> None:
        if inbound is not None and num_tokens:
            num_tokens = inbound.room.wanted.request.num_tokens
        super()._on_length(inbound, num_tokens)


@broken_rule(machine("target"))
class OfferAtOnce(TargetMachine):
    """A target offers its pages before the answer."""

    def _begin(self, inbound: InboundTransfer) -> None:
        super()._begin(inbound)
        if inbound.state is InboundState.ASKING:
            self.inbounds.offer(inbound)


@broken_rule(target_part("inbounds"), drop=0.3)
class AskOnce(InboundTransfers):
    """A lost Ask or Holding is not repaired."""

    def repeat(self, inbound: InboundTransfer, serials: tuple[Serial, ...]) -> None:
        if inbound.state is InboundState.ASKING:
            inbound.sent_at = self._outbox.now
        else:
            super().repeat(inbound, serials)
