"""The cache of one rank's binding templates, and of bindings that are needed again.

Requests of one size differ only in their pages. So do the fragments that a long request is cut
into, which also begin at different tokens. The cache makes a **template** for the first of them and
shifts it for the others. It keeps a **binding** from its first use (to choose a transfer mode, or
because the block will probably be next) until the binding is used or its room ends.

Not thread-safe. Pools and plans are compared by identity, and an entry keeps them alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvferry.ids import Room
from kvferry.plan.bind import Binding, BindingTemplate, RankPair, make_template
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block, Plan, Request

MAX_TEMPLATES = 1024
MAX_BINDINGS = 512


class PairPools(NamedTuple):
    """A pair of ranks with the pools at both ends. A staging slot has no pools."""

    plan: Plan
    pair: RankPair
    source: PoolMap | None
    target: PoolMap | None


class _CachedTemplate(NamedTuple):
    """A template of blocks that begin at token ``first``."""

    pools: PairPools
    first: int
    template: BindingTemplate


class BindingCache:
    """At most ``max_templates`` templates and ``max_bindings`` bindings. It drops the oldest."""

    def __init__(
        self, max_templates: int = MAX_TEMPLATES, max_bindings: int = MAX_BINDINGS
    ) -> None:
        self._max_templates = max_templates
        self._max_bindings = max_bindings
        self._templates: OrderedDict[Hashable, _CachedTemplate] = OrderedDict()
        self._bindings: OrderedDict[tuple[Room, Hashable], Binding] = OrderedDict()
        # Number of templates made so far, for tests.
        self.num_made = 0

    @property
    def num_templates(self) -> int:
        """Number of cached templates."""
        return len(self._templates)

    @property
    def num_bindings(self) -> int:
        """Number of cached bindings."""
        return len(self._bindings)

    def template(
        self, pools: PairPools, request: Request, blocks: Sequence[Block]
    ) -> BindingTemplate:
        """Return the template of these blocks, from the cache if one of the same shape is there."""
        plan, pair, source, target = pools
        identity = id(plan), pair, id(source), id(target)
        cycle = plan.page_cycle(*pair, blocks[0].group) if len(blocks) == 1 else None
        if cycle is None:
            key: Hashable = (*identity, request, tuple(blocks))
            return self._cached(key, pools, request, blocks).template
        (block,) = blocks
        first, num_tokens = block.tokens.first, len(block.tokens)
        key = (*identity, block.group, block.layers, num_tokens, first % cycle.num_tokens)
        cached = self._cached(key, pools, request, blocks)
        if first == cached.first:
            return cached.template
        num_cycles = (first - cached.first) // cycle.num_tokens
        return cached.template.shifted(
            0 if source is None else num_cycles * cycle.source_pages,
            0 if target is None else num_cycles * cycle.target_pages,
        )

    def _cached(
        self, key: Hashable, pools: PairPools, request: Request, blocks: Sequence[Block]
    ) -> _CachedTemplate:
        cached = self._templates.get(key)
        if cached is not None:
            self._templates.move_to_end(key)
            return cached
        self.num_made += 1
        plan, pair, source, target = pools
        template = make_template(plan, pair, request, source, target, blocks)
        first = blocks[0].tokens.first if blocks else 0
        cached = self._templates[key] = _CachedTemplate(pools, first, template)
        if len(self._templates) > self._max_templates:
            self._templates.popitem(last=False)
        return cached

    # ------------------------------------------------------------ bindings of rooms

    def keep(self, room: Room, key: Hashable, binding: Binding) -> None:
        """Keep a binding of a room under a key."""
        self._bindings[room, key] = binding
        if len(self._bindings) > self._max_bindings:
            self._bindings.popitem(last=False)

    def get(self, room: Room, key: Hashable) -> Binding | None:
        """Return a room's binding, the same object that was kept, or None."""
        return self._bindings.get((room, key))

    def drop(self, room: Room, key: Hashable) -> Binding | None:
        """Remove a room's binding and return it, or None."""
        return self._bindings.pop((room, key), None)

    def forget(self, room: Room) -> None:
        """Remove every binding of a room that has ended."""
        if self._bindings:
            for key in [key for key in self._bindings if key[0] == room]:
                del self._bindings[key]
