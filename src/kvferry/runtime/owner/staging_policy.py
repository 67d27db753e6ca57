"""Which blocks go through staging: the chooser, asked with a room's own pages.

A chunk is bound once: what was bound to choose its path is written with the same binding, and
what of it comes layer by layer is cut out of it. A block of a few layers is looked at as what
it is: it may go another way than the whole chunk would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.ids import Room, Session
from kvferry.plan.bind import Binding, Outline, Pair, Side, outline
from kvferry.plan.choose import Path, choose, shape_of
from kvferry.plan.cost import Constants
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.events import Write
from kvferry.protocol.lanes import Lane
from kvferry.protocol.messages import Table

# Chunks whose binding is kept while parts of it are still to come; others are bound again.
MAX_BOUND = 512
# Short requests of one size recur, and all but their pages is the same in each.
MAX_OUTLINES = 128


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
        foresee: Callable[[Session, Binding], None] = lambda _, __: None,
    ) -> None:
        self._rank = rank
        self._sides_of = sides_of
        self._constants_of = constants_of
        self._override = override
        self._foresee = foresee
        # Whole chunks that were bound, and of which something is not yet written.
        self._bound: OrderedDict[tuple[Room, Session, int, Block], Binding] = OrderedDict()
        self._outlines: dict[tuple[Session, Request, Block], Outline] = {}

    def __call__(self, lane: Lane, block: Block) -> bool:
        """Whether a block of a lane is staged."""
        constants = self._constants_of(lane.link.session)
        if self._override is not None and not constants.maps_peer:
            return self._override is Path.STAGED
        try:
            binding = self._bound_early(lane, block)
        except InputError:
            # Its pages are not all known yet, or wrong; writing it will tell.
            return False
        if constants.maps_peer:
            return False
        return choose(shape_of(binding), constants).path is Path.STAGED

    def _bound_early(self, lane: Lane, block: Block) -> Binding:
        """What a block copies: asked when it is announced, so that its push finds it bound."""
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
        ((part, whole),) = self._within(course, block)
        binding = self._part(course, part, whole)
        if part == whole:
            self._foresee(link.session, binding)
        return binding

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
        found: list[Binding] = []
        for block in action.blocks:
            for part, whole in self._within(course, block):
                found.append(self._part(course, part, whole))
                if part == whole:
                    self._bound.pop(_key(course, whole), None)
        # The very one that was foreseen, if there is one.
        return found[0] if len(found) == 1 else Binding(tuple(p for b in found for p in b.parts))

    def forget(self, room: Room) -> None:
        """A room is over."""
        for key in [key for key in self._bound if key[0] == room]:
            del self._bound[key]

    def _within(self, course: Course, block: Block) -> list[tuple[Block, Block]]:
        """The chunks that a block has a part of, each as all layers that are owed alike."""
        owed = course.plan.blocks(self._rank, course.target, course.request)
        if block in owed:
            return [(block, block)]
        mine = [replace(b, tokens=block.tokens) for b in owed if b.group == block.group]
        parts = [(replace(b, layers=b.layers.intersect(block.layers)), b) for b in mine]
        return [(part, whole) for part, whole in parts if len(part.layers)]

    def _part(self, course: Course, block: Block, whole: Block) -> Binding:
        """What a block copies, cut out of its chunk."""
        key = _key(course, whole)
        binding = self._bound.get(key)
        if binding is None:
            binding = self._bound[key] = self._bind(course, whole)
            if len(self._bound) > MAX_BOUND:
                self._bound.popitem(last=False)
        return binding if block == whole else binding.of_layers(block.layers)

    def _bind(self, course: Course, whole: Block) -> Binding:
        ours, theirs = self._sides_of(course)
        key = course.session, course.request, whole
        known = self._outlines.get(key)
        if known is None:
            if len(self._outlines) >= MAX_OUTLINES:
                self._outlines.clear()
            pair = Pair(self._rank, course.target)
            pools = ours.pools, theirs.pools
            known = outline(course.plan, pair, course.request, *pools, (whole,))
            self._outlines[key] = known
        return known.on(ours.tables, theirs.tables)


def _key(course: Course, whole: Block) -> tuple[Room, Session, int, Block]:
    return course.room, course.session, course.generation, whole
