"""The target's record of what has arrived: coverage, not a count of messages.

What must arrive is derived from the plan, the same plan from which each source
derives what it sends. Repeated, overlapping and reordered blocks are harmless,
and how a source cut its chunks does not matter.
"""

from __future__ import annotations

from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import Group
from kvferry.plan.plan import Block, Plan, Request

Key = tuple[int, str, int]


class Ledger:
    """Coverage of token spans per source, group and layer, for one room of one target."""

    def __init__(self, plan: Plan, target: int, request: Request) -> None:
        self._groups: dict[str, Group] = {group.name: group for group in plan.spec.groups}
        self._owed: dict[Key, Span] = {
            (source, block.group, layer): block.tokens
            for source in plan.sources_of(target)
            for block in plan.blocks(source, target, request)
            for layer in self._groups[block.group].layers_in(block.layers)
        }
        self._arrived: dict[Key, SpanSet] = {}
        self._open: set[Key] = set(self._owed)

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return not self._open

    @property
    def begun(self) -> bool:
        """Whether anything has arrived."""
        return bool(self._arrived)

    def owes(self, source: int, block: Block) -> bool:
        """Whether the whole block is something that the source owes here."""
        keys = self._keys(source, block)
        return bool(keys) and all(
            key in self._owed and self._owed[key].covers(block.tokens) for key in keys
        )

    def add(self, source: int, block: Block) -> None:
        """Record that a block is in the target's pages."""
        for key in self._keys(source, block):
            spans = self._arrived.setdefault(key, SpanSet())
            spans.add(block.tokens)
            if spans.covers(self._owed[key]):
                self._open.discard(key)

    def missing(self, source: int) -> int:
        """How many layers, over all groups, still lack something from that source."""
        return sum(key[0] == source for key in self._open)

    def _keys(self, source: int, block: Block) -> list[Key]:
        group = self._groups.get(block.group)
        layers = group.layers_in(block.layers) if group else ()
        return [(source, block.group, layer) for layer in layers]

    def __repr__(self) -> str:
        return f"<Ledger {len(self._owed) - len(self._open)} of {len(self._owed)} layers complete>"
