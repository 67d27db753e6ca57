"""Which blocks go through staging: the chooser, asked with a room's own pages.

A block is bound once: what was bound to choose its path is written with the same binding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.ids import Room, Session
from kvferry.plan.bind import Binding, Pair, Side, bind
from kvferry.plan.choose import Constants, Path, choose, shape_of
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.events import Write
from kvferry.protocol.lanes import Lane
from kvferry.protocol.messages import Table


class Sides(NamedTuple):
    """Where a write reads and where it writes: pools and pages of both."""

    ours: Side
    theirs: Side


class Course(NamedTuple):
    """One offer of one room: what is to be bound, and between whose pages."""

    room: Room
    session: Session
    generation: int
    plan: Plan
    target: int
    request: Request
    tables: tuple[Table, ...]


class StagingPolicy:
    """A staging policy. What a session's link costs may change as it is measured."""

    def __init__(
        self,
        rank: int,
        sides_of: Callable[[Course], Sides],
        constants_of: Callable[[Session], Constants],
        override: Path | None = None,
    ) -> None:
        self._rank = rank
        self._sides_of = sides_of
        self._constants_of = constants_of
        self._override = override
        # What was bound and is not yet written, by room.
        self._bound: dict[Room, dict[tuple[Session, int, Block], Binding]] = {}

    def __call__(self, lane: Lane, block: Block) -> bool:
        """Whether a block of a lane is staged."""
        constants = self._constants_of(lane.link.session)
        if constants.maps_peer:
            return False
        if self._override is not None:
            return self._override is Path.STAGED
        try:
            return self._choose(lane, block, constants) is Path.STAGED
        except InputError:
            # Its pages are not all known yet, or wrong; writing it will tell.
            return False

    def _choose(self, lane: Lane, block: Block, constants: Constants) -> Path:
        link = lane.link
        course = Course(
            room=lane.room.name,
            session=link.session,
            generation=lane.generation,
            plan=link.plan,
            target=lane.peer.rank,
            request=lane.request,
            tables=lane.tables,
        )
        bound = self._bound.setdefault(course.room, {})
        key = (link.session, lane.generation, block)
        # Credits may have been asked for before, when the block was announced.
        binding = bound.pop(key, None) or self._bind(course, (block,))
        path = choose(shape_of(binding), constants).path
        if path is not Path.STAGED:
            bound[key] = binding
        return path

    def binding(self, plan: Plan, action: Write) -> Binding:
        """What a direct write copies. Raises ``InputError`` where the pages are wrong."""
        session = action.note.session
        course = Course(
            room=action.room,
            session=session,
            generation=action.generation,
            plan=plan,
            target=action.peer.rank,
            request=action.request,
            tables=action.tables,
        )
        bound = self._bound.get(action.room, {})
        keys = [(session, action.generation, block) for block in action.blocks]
        if not all(key in bound for key in keys):
            return self._bind(course, action.blocks)
        return Binding(tuple(part for key in keys for part in bound.pop(key).parts))

    def forget(self, room: Room) -> None:
        """A room is over."""
        self._bound.pop(room, None)

    def _bind(self, course: Course, blocks: tuple[Block, ...]) -> Binding:
        ours, theirs = self._sides_of(course)
        pair = Pair(self._rank, course.target)
        return bind(course.plan, pair, course.request, ours, theirs, blocks)
