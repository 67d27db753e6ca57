"""The target's record of what has arrived: coverage, not a count of messages.

What must arrive is derived from the plan, the same plan from which each source
derives what it sends. Repeated, overlapping and reordered blocks are harmless,
and how a source cut its chunks does not matter.

Coverage is kept per plot: some layers of a group that one source owes. A plot is
split when a block arrives for only some of its layers, so whole chunks, which
are the rule, cost one entry and not one per layer.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from kvferry.layout.intervals import Span, SpanSet, cut
from kvferry.layout.spec import Group
from kvferry.plan.plan import Block, Plan, Request


@dataclass(slots=True, eq=False)
class Plot:
    """Layers whose tokens arrive together."""

    layers: Span
    owed: Span
    arrived: SpanSet = field(default_factory=SpanSet)

    @property
    def complete(self) -> bool:
        """Whether every token is there."""
        return self.arrived.covers(self.owed)


class Ledger:
    """What each source owes one target in one room, and what of it has come."""

    def __init__(self, plan: Plan, target: int, request: Request) -> None:
        self._groups: dict[str, Group] = {group.name: group for group in plan.spec.groups}
        self._plots: dict[tuple[int, str], list[Plot]] = {}
        for source in plan.sources_of(target):
            for block in plan.blocks(source, target, request):
                plots = self._plots.setdefault((source, block.group), [])
                plots.append(Plot(block.layers, block.tokens))
        self._open: set[tuple[int, str]] = set(self._plots)
        self.begun = False

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return not self._open

    def owes(self, source: int, block: Block) -> bool:
        """Whether the whole block is something that the source owes here."""
        plots = self._touched(source, block)
        if not plots or not all(plot.owed.covers(block.tokens) for plot in plots):
            return False
        group = self._groups[block.group]
        mine = sum(len(group.layers_in(plot.layers.intersect(block.layers))) for plot in plots)
        return mine == len(group.layers_in(block.layers))

    def add(self, source: int, block: Block) -> None:
        """Record that a block is in the target's pages."""
        key = (source, block.group)
        for plot in self._touched(source, block):
            if not block.layers.covers(plot.layers):
                self._split(key, plot, block.layers)
        for plot in self._touched(source, block):
            plot.arrived.add(block.tokens)
        if all(plot.complete for plot in self._plots[key]):
            self._open.discard(key)
        self.begun = True

    def missing(self, source: int) -> int:
        """How many layers, over all groups, still lack something from that source."""
        return sum(
            len(self._groups[key[1]].layers_in(plot.layers))
            for key in self._open
            if key[0] == source
            for plot in self._plots[key]
            if not plot.complete
        )

    def lacking(self, doubted: Container[int] = ()) -> list[Block]:
        """What has not arrived, from whichever source, or came from one that is doubted."""
        return [
            Block(group, plot.layers, gap)
            for source, group in sorted(self._plots)
            for plot in self._plots[source, group]
            for gap in ([plot.owed] if source in doubted else plot.arrived.gaps(plot.owed))
        ]

    def _touched(self, source: int, block: Block) -> list[Plot]:
        """The plots that have one of the block's layers."""
        group = self._groups.get(block.group)
        plots = self._plots.get((source, block.group), ())
        return [p for p in plots if group and group.layers_in(p.layers.intersect(block.layers))]

    def _split(self, key: tuple[int, str], plot: Plot, layers: Span) -> None:
        """Cut a plot where the layers of a block begin and end."""
        plots = self._plots[key]
        plots.remove(plot)
        inside = layers.intersect(plot.layers)
        for piece in cut([plot.layers, inside]):
            plots.append(Plot(piece, plot.owed, plot.arrived.copy()))

    def __repr__(self) -> str:
        sources = {source for source, _ in self._plots}
        return f"<Ledger lacks {sum(map(self.missing, sources))} layers>"
