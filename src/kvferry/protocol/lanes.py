"""A source's rooms and lanes: what is owed, what waits, what is in flight.

Plain state with no decisions about messages; ``source`` makes those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from kvferry.ids import Generation, Op, Peer, Room, Serial, SlotIndex
from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import Slot
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.cutting import cut_to_slots, within
from kvferry.protocol.endpoint import Link
from kvferry.protocol.events import Finish
from kvferry.protocol.messages import Arrived, Credit, Table
from kvferry.protocol.outcome import Failure
from kvferry.protocol.states import LaneState, RoomState


@dataclass(slots=True, eq=False)
class Lane:
    """What this source owes one target in one room, and how far it has come."""

    room: SourceRoom
    link: Link
    generation: Generation
    request: Request
    tables: tuple[Table, ...]
    owed: tuple[Block, ...]
    said_at: float
    state: LaneState = LaneState.SENDING
    direct: deque[Block] = field(default_factory=deque)
    staged: deque[Block] = field(default_factory=deque)
    asked: dict[Hashable, int] = field(default_factory=dict)
    waiting_since: float = 0.0
    busy_until: float = 0.0
    credit: dict[Serial, SlotIndex] = field(default_factory=dict)
    used: set[Serial] = field(default_factory=set)
    notes: dict[Serial, Arrived] = field(default_factory=dict)
    written: list[Block] = field(default_factory=list)
    inflight: set[Op] = field(default_factory=set)

    @property
    def peer(self) -> Peer:
        """The target."""
        return self.link.peer

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting to be written or being written."""
        return not (self.direct or self.staged or self.inflight)

    @property
    def num_wanted(self) -> int:
        """Credits that this lane needs over its life, as far as is known."""
        return sum(self.asked.values())

    def drop_pending(self) -> None:
        """Forget what has not been submitted."""
        self.direct.clear()
        self.staged.clear()


@dataclass(slots=True, eq=False)
class SourceRoom:
    """One room of one source rank. ``plan`` and ``instance`` come with the first offer."""

    name: Room
    state: RoomState
    deadline: float
    plan: Plan | None = None
    instance: str | None = None
    pushes: list[Span] = field(default_factory=list)
    pushed: SpanSet = field(default_factory=SpanSet)
    finish: Finish | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    failure: Failure | None = None

    @property
    def known_to_engine(self) -> bool:
        """Whether the engine has opened it and waits for its end."""
        return self.state not in (RoomState.EARLY, RoomState.WARNED, RoomState.OVER)

    def awaits_offers(self, source: int) -> bool:
        """Whether some target that should tell this source of the room has not done so."""
        return self.plan is None or not self.heard.issuperset(self.plan.audience(source))

    def lacks(self, lane: Lane) -> Block | None:
        """Something owed on the lane that was never pushed."""
        return next((block for block in paged(lane) if not self.pushed.covers(block.tokens)), None)


@dataclass(slots=True, eq=False)
class Writing:
    """A write that is under way, or whose fate is unknown."""

    lane: Lane
    blocks: tuple[Block, ...]
    credit: Credit | None
    local_slot: SlotIndex | None


# Decides whether a block of a lane goes through staging.
StagePolicy = Callable[[Lane, Block], bool]


def never_stage(lane: Lane, block: Block) -> bool:
    """Write everything straight into the target's pages."""
    return False


def paged(lane: Lane) -> list[Block]:
    """What follows tokens, and so becomes available push by push."""
    groups = lane.link.plan.spec
    return [b for b in lane.owed if not isinstance(groups.group(b.group).kind, Slot)]


def states(lane: Lane) -> list[Block]:
    """State rows: available when the engine has finished."""
    groups = lane.link.plan.spec
    return [b for b in lane.owed if isinstance(groups.group(b.group).kind, Slot)]


def cut(
    lane: Lane, source: int, blocks: Iterable[Block], stages: StagePolicy, local_bytes: int
) -> tuple[list[Block], list[Block]]:
    """Blocks to write directly, and fragments that each fit a slot of either side."""
    assert lane.link.hello is not None
    staging, plan, target = lane.link.hello.staging, lane.link.plan, lane.peer.rank
    slot_bytes = min(staging.slot_bytes, local_bytes)
    direct: list[Block] = []
    staged: list[Block] = []
    for block in blocks:
        fragments = None
        if staging.num_slots and stages(lane, block):
            fragments = cut_to_slots(plan, source, target, block, slot_bytes)
        if fragments is None:
            direct.append(block)
        else:
            staged += fragments
    return direct, staged


def chunk(lane: Lane, tokens: Span) -> list[Block]:
    """What a push of those tokens means for the lane."""
    return within(paged(lane), tokens)
