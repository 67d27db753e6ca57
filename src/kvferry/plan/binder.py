"""Binding for one pair of ranks, again and again.

A long request is cut into fragments, which are alike but for where they begin. All but their
pages is worked out for the first of them, and for the others it is moved by so many pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvferry.layout.intervals import ALL_TOKENS, Span
from kvferry.layout.spec import Slot
from kvferry.plan.bind import Binding, Image, Outline, Pair, Side, outline
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block, Plan, Request

# Fragments of one request have one or two sizes; requests have many.
MAX_KNOWN = 64
# Pairs whose binder is kept.
MAX_BINDERS = 256


class Binder:
    """``bind`` for the memory of one pair. An image has no pools."""

    def __init__(
        self, plan: Plan, pair: Pair, source: PoolMap | None, target: PoolMap | None
    ) -> None:
        self.plan = plan
        self.pair = pair
        self._source = source
        self._target = target
        self._page_tokens = plan.source.page_tokens, plan.target.page_tokens
        # Where tokens lie in pages comes again after so many.
        self._period = lcm(*self._page_tokens)
        self._regular: dict[str, bool] = {}
        self._known: dict[tuple[str, Span, int, int], tuple[int, Outline]] = {}

    def bind(
        self,
        request: Request,
        source: Side | Image,
        target: Side | Image,
        blocks: Sequence[Block],
    ) -> Binding:
        """What ``bind.bind`` gives. Raises ``InputError`` where the pages are wrong."""
        return self._outline(request, blocks).on(source.tables, target.tables)

    def _outline(self, request: Request, blocks: Sequence[Block]) -> Outline:
        if len(blocks) != 1 or not self._is_regular(blocks[0].group):
            return self._sketch(request, blocks)
        (block,) = blocks
        first, count = block.tokens.first, len(block.tokens)
        key = block.group, block.layers, count, first % self._period
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = first, self._sketch(request, blocks)
        at, sketch = known
        pages = [(first - at) // page_tokens for page_tokens in self._page_tokens]
        return sketch.moved(
            0 if self._source is None else pages[0], 0 if self._target is None else pages[1]
        )

    def _sketch(self, request: Request, blocks: Sequence[Block]) -> Outline:
        return outline(self.plan, self.pair, request, self._source, self._target, blocks)

    def _is_regular(self, group: str) -> bool:
        """Whether the pair's ranks have every token of the group, so that blocks are whole."""
        known = self._regular.get(group)
        if known is None:
            known = self._regular[group] = self._look(group)
        return known

    def _look(self, group: str) -> bool:
        if isinstance(self.plan.spec.group(group).kind, Slot):
            return False
        moves = (move for move in self.plan.between(*self.pair) if move.group == group)
        return all(move.tokens == ALL_TOKENS for move in moves)


class Binders:
    """A binder for every pair of one rank's memory with images."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Pair], Binder] = {}

    def of(self, plan: Plan, pair: Pair, source: PoolMap | None, target: PoolMap | None) -> Binder:
        """The one for that pair. The pools are the same every time."""
        key = id(plan), pair
        known = self._known.get(key)
        # An identity may be another's by now.
        if known is None or known.plan is not plan:
            if len(self._known) >= MAX_BINDERS:
                self._known.clear()
            known = self._known[key] = Binder(plan, pair, source, target)
        return known
