"""The target's record of its rooms: what each expects from each of its sources."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.ids import Generation, Op, Room, SlotIndex
from kvferry.plan.plan import Block, Plan
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import Instance, ReceiveRequest
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.states import LegState


@dataclass(slots=True, eq=False)
class Leg:
    """What a room expects from one source."""

    source: int
    link: Link
    said_at: float
    state: LegState = LegState.CONNECTING
    offer_seq: int = 0
    accepted: bool = False
    vouched: bool = False  # it has said what it computed, and that is what was asked for


@dataclass(slots=True, eq=False)
class TargetRoom:
    """One room of one target rank."""

    wanted: ReceiveRequest
    generation: Generation
    prefill: Instance
    plan: Plan
    deadline: float
    ledger: Ledger
    legs: dict[int, Leg] = field(default_factory=dict)
    scatters: set[Op] = field(default_factory=set)
    metadata: bytes = b""
    failure: Failure | None = None

    @property
    def name(self) -> Room:
        """Which room."""
        return self.wanted.room

    def unusable(self) -> list[Block]:
        """After a failure: what never came, and what came from a source that may be wrong.

        Where the engine gave a digest, what a source wrote counts only once it has vouched.
        """
        differs = self.failure is not None and self.failure.code is FailureCode.CONTENT_DIFFERS
        vouches = bool(self.wanted.digest)
        return self.ledger.lacking(
            {n for n, leg in self.legs.items() if differs or (vouches and not leg.vouched)}
        )


@dataclass(slots=True, eq=False)
class Scattering:
    """A scatter that is under way."""

    room: TargetRoom
    source: int
    blocks: tuple[Block, ...]
    slot: SlotIndex
