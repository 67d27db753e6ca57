"""Gathers ahead in the simulated world: they read pages at a moment of their own.

Pages are read, and the slot is filled, somewhere between the gather's beginning and its end,
so that pages or a slot that were given up too early show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.ids import Op, Room, SlotIndex
from kvferry.plan.bind import Descriptors, PagedView, RankPair, StagingView, bind
from kvferry.protocol.events import Gather, Post, SendFailed, Write, WriteFate
from kvferry.testing.sim.memory import SimMemory, fetch

if TYPE_CHECKING:
    from kvferry.testing.sim.engines import SourceNode
    from kvferry.testing.sim.world import World


@dataclass(eq=False)
class SimGather:
    """One gather, until it is written or answered."""

    source: SourceNode
    action: Gather
    ours: PagedView
    post: Post | None = None
    discarded: bool = False
    over: bool = False

    def fill(self, world: World) -> None:
        """Read the pages, and fill the slot."""
        action, transfer, memory = self.action, self.action.transfer, self.source.memory
        pair = RankPair(transfer.source, transfer.peer.rank)
        binding = bind(
            transfer.plan, pair, transfer.request, self.ours, StagingView(), action.blocks
        )
        fill_slot(world, memory, action.local_slot, binding.descriptors(), transfer.room)

    def write(self) -> Write:
        """What was gathered, as a write of its slot."""
        assert self.post is not None
        action, post = self.action, self.post
        what = action.op, action.transfer, action.blocks
        return Write(*what, post.note, post.slot, action.local_slot)


def fill_slot(
    world: World, memory: SimMemory, slot: SlotIndex, pieces: Descriptors, room: Room
) -> None:
    """Copy pieces of pages into a slot, which must hold them."""
    if pieces.length.sum() > memory.slot_bytes:
        world.violate("never corrupts", "a parcel is larger than a slot", room)
    data = fetch(memory.regions, pieces)
    for at, piece in zip(pieces.target_offset, data, strict=True):
        memory.slots[slot][at : at + len(piece)] = np.frombuffer(piece, np.uint8)


class SimGathers:
    """Every gather of every source. ``write`` is given what is posted and filled."""

    def __init__(self, world: World, write: Callable[[SourceNode, Write], None]) -> None:
        self._world = world
        self._write = write
        self._gathers: dict[tuple[SourceNode, Op], SimGather] = {}
        self.extra_s = 0.0  # every gather takes so much longer

    def begin(self, gather: SimGather) -> None:
        """Fill a slot, at some moment."""
        rng, world = self._world.rng, self._world
        self.demand_free(gather.source, gather.action.local_slot, gather.action.transfer.room)
        self._gathers[gather.source, gather.action.op] = gather
        took = 0.001 + rng.random() * 0.01 + (0.0 if world.calm else self.extra_s)
        if world.strikes("slow_write"):
            took += rng.random() * 0.5
        world.at(rng.random() * took, lambda: self._fill(gather))
        world.at(took, lambda: self._end(gather))

    def post(self, source: SourceNode, post: Post) -> None:
        """Write a slot, when it is filled."""
        gather = self._gathers.get((source, post.op))
        if gather is not None:  # Or else it has failed, which is being told.
            gather.post = post
            self._settle(gather)

    def discard(self, source: SourceNode, op: Op) -> None:
        """Write nothing."""
        gather = self._gathers.get((source, op))
        if gather is not None:
            gather.discarded = True
            self._settle(gather)

    def demand_free(self, source: SourceNode, slot: SlotIndex, room: Room) -> None:
        """No gather may still be filling a slot that another fills."""
        if any(gather.local_slot == slot for gather in self.reading(source)):
            text = f"{source.peer} fills a slot that is being filled"
            self._world.violate("never reuses", text, room)

    def reading(self, source: SourceNode) -> list[Gather]:
        """Those that may still read pages."""
        mine = (one for one in self._gathers.values() if one.source is source)
        return [gather.action for gather in mine if not gather.over]

    def confirm_dead(self, source: object) -> None:
        """A process was killed, and its gathers with it."""
        for key in [key for key in self._gathers if key[0] is source]:
            del self._gathers[key]

    def _fill(self, gather: SimGather) -> None:
        if gather.source.process.alive:
            gather.fill(self._world)

    def _end(self, gather: SimGather) -> None:
        gather.over = True
        if not gather.source.process.alive:
            return
        if self._world.strikes("write_failed"):
            self._forget(gather)
            gather.source.deliver(SendFailed(gather.action.op, WriteFate.FAILED))
        else:
            self._settle(gather)

    def _settle(self, gather: SimGather) -> None:
        """Go on with a slot that is filled, if it was said what becomes of it."""
        if not gather.over:
            return
        if gather.discarded:
            self._forget(gather)
            delay = self._world.rng.random() * 0.004
            busy = SendFailed(gather.action.op, WriteFate.BUSY)
            self._world.at(delay, lambda: gather.source.deliver(busy))
        elif gather.post is not None:
            self._forget(gather)
            self._write(gather.source, gather.write())

    def _forget(self, gather: SimGather) -> None:
        del self._gathers[gather.source, gather.action.op]
