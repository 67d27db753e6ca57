"""The cache of one rank's bindings, and of what they are made from.

Requests of one size have all but their pages in common, and so have the fragments that a long
request is cut into, which are alike but for where they begin: an **outline** is worked out for
the first of them and moved by so many pages for the others. A **binding** is kept from when it
is first needed, to choose how a chunk travels or because it will probably come next, until it is
used or its room is over.

For one thread. Pools and plans are known by their identity: an entry keeps them alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import lcm
from typing import NamedTuple

from kvferry.ids import Room
from kvferry.plan.bind import Binding, Outline, RankPair, outline
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block, Plan, Request

MAX_OUTLINES = 1024
MAX_BINDINGS = 512


class Between(NamedTuple):
    """The two memories that a binding joins. An image, such as a staging slot, has no pools."""

    plan: Plan
    pair: RankPair
    source: PoolMap | None
    target: PoolMap | None


class _KnownPair(NamedTuple):
    """An outline, of blocks that begin at token ``first``."""

    between: Between
    first: int
    outline: Outline


class BindingCache:
    """At most ``max_outlines`` outlines and ``max_bindings`` bindings; the oldest go first."""

    def __init__(self, max_outlines: int = MAX_OUTLINES, max_bindings: int = MAX_BINDINGS) -> None:
        self._max_outlines = max_outlines
        self._max_bindings = max_bindings
        self._outlines: OrderedDict[Hashable, _KnownPair] = OrderedDict()
        self._bindings: OrderedDict[tuple[Room, Hashable], Binding] = OrderedDict()
        # Number of outlines computed so far, for tests.
        self.num_outlined = 0

    @property
    def num_outlines(self) -> int:
        """Outlines that are kept."""
        return len(self._outlines)

    @property
    def num_bindings(self) -> int:
        """Bindings that are kept."""
        return len(self._bindings)

    def outline(self, between: Between, request: Request, blocks: Sequence[Block]) -> Outline:
        """Return the outline of ``plan.bind``. Its ``on`` raises where the pages are wrong."""
        plan, pair, source, target = between
        who = id(plan), pair, id(source), id(target)
        if len(blocks) != 1 or not plan.has_every_token(*pair, blocks[0].group):
            return self._known((*who, request, tuple(blocks)), between, request, blocks).outline
        (block,) = blocks
        first, count = block.tokens.first, len(block.tokens)
        page_tokens = plan.source.page_tokens, plan.target.page_tokens
        # Where tokens lie in pages comes again after so many.
        phase = first % lcm(*page_tokens)
        key = *who, block.group, block.layers, count, phase
        known = self._known(key, between, request, blocks)
        if first == known.first:
            return known.outline
        ours, theirs = ((first - known.first) // size for size in page_tokens)
        return known.outline.moved(0 if source is None else ours, 0 if target is None else theirs)

    def _known(
        self, key: Hashable, between: Between, request: Request, blocks: Sequence[Block]
    ) -> _KnownPair:
        known = self._outlines.get(key)
        if known is not None:
            self._outlines.move_to_end(key)
            return known
        self.num_outlined += 1
        plan, pair, source, target = between
        made = outline(plan, pair, request, source, target, blocks)
        first = blocks[0].tokens.first if blocks else 0
        known = self._outlines[key] = _KnownPair(between, first, made)
        if len(self._outlines) > self._max_outlines:
            self._outlines.popitem(last=False)
        return known

    # ------------------------------------------------------------ bindings of rooms

    def keep(self, room: Room, key: Hashable, binding: Binding) -> None:
        """Have a binding until it is dropped, or too many others have come."""
        self._bindings[room, key] = binding
        if len(self._bindings) > self._max_bindings:
            self._bindings.popitem(last=False)

    def get(self, room: Room, key: Hashable) -> Binding | None:
        """The very binding that is kept, if it still is."""
        return self._bindings.get((room, key))

    def drop(self, room: Room, key: Hashable) -> Binding | None:
        """The same, and let go of it."""
        return self._bindings.pop((room, key), None)

    def forget(self, room: Room) -> None:
        """A room is over."""
        if self._bindings:
            for key in [key for key in self._bindings if key[0] == room]:
                del self._bindings[key]
