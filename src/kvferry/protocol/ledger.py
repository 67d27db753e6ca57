"""The target's record of what has arrived: coverage, not a count of messages.

What must arrive is derived from the plan, the same plan from which each source
derives what it sends. Repeated, overlapping and reordered blocks are harmless,
and how a source cut its chunks, by tokens or by layers, does not matter.

A group's layers are counted by their places in the group here, not by their
numbers in the model, so that neighbours are neighbours whatever lies between.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import Group
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.checks import close_problem
from kvferry.protocol.messages import Close
from kvferry.protocol.outcome import Failure


@dataclass(slots=True, eq=False)
class ExpectedBlocks:
    """What one source owes of one group: these tokens of these places, and what has come."""

    group: Group
    tokens: Span
    places: SpanSet = field(default_factory=SpanSet)
    arrived: Coverage = field(default_factory=Coverage)

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return all(self.arrived.covers(places, self.tokens) for places in self.places.spans)

    def lacking(self) -> list[tuple[Span, SpanSet]]:
        """Places, and what each of them lacks."""
        return [
            (strip.layers, strip.tokens)
            for places in self.places.spans
            for strip in self.arrived.gaps(places, self.tokens)
        ]

    def block(self, places: Span, tokens: Span) -> Block:
        """As the rest of the protocol names it."""
        return Block(self.group.name, self.group.layers_at(places), tokens)


class Ledger:
    """Blocks that each source owes one target in one room, and those that have arrived.

    ``contacts`` are the sources that must close the room, whether they owe something or not.
    """

    def __init__(self, plan: Plan, target: int, request: Request, digest: bytes = b"") -> None:
        self._num_tokens = request.num_tokens
        self._digest = digest
        self._unclosed = set(plan.contacts(target))
        self._expected: dict[tuple[int, str], ExpectedBlocks] = {}
        for source in plan.sources_of(target):
            for block in plan.blocks(source, target, request):
                group = plan.spec.group(block.group)
                expected = self._expected.setdefault(
                    (source, group.name), ExpectedBlocks(group, block.tokens)
                )
                expected.places.add(group.places_in(block.layers))
        self._open: set[tuple[int, str]] = set(self._expected)
        self.begun = False

    @property
    def complete(self) -> bool:
        """Whether every source has closed and everything has arrived."""
        return not self._unclosed and self.covered

    @property
    def covered(self) -> bool:
        """Whether everything has arrived."""
        return not self._open

    def problem(self, close: Close) -> Failure | None:
        """Return why what a source says it computed is not what was asked for."""
        return close_problem(close, self._num_tokens, self._digest)

    def close(self, source: int) -> None:
        """Record that a source has written everything it owes."""
        self._unclosed.discard(source)

    def owes(self, source: int, block: Block) -> bool:
        """Whether the whole block is something that the source owes here."""
        expected = self._expected.get((source, block.group))
        if expected is None or not expected.tokens.covers(block.tokens):
            return False
        places = expected.group.places_in(block.layers)
        return len(places) > 0 and expected.places.covers(places)

    def add(self, source: int, block: Block) -> None:
        """Record that a block is in the target's pages."""
        key = (source, block.group)
        expected = self._expected[key]
        expected.arrived.add(expected.group.places_in(block.layers), block.tokens)
        if expected.complete:
            self._open.discard(key)
        self.begun = True

    def add_all(self, source: int, blocks: Iterable[Block]) -> None:
        """Record that blocks are in the target's pages."""
        for block in blocks:
            self.add(source, block)

    def missing(self, source: int) -> int:
        """How many layers, over all groups, still lack something from that source."""
        return sum(
            len(places)
            for key in self._open
            if key[0] == source
            for places, _ in self._expected[key].lacking()
        )

    def lacking(self, doubted: Container[int] = ()) -> list[Block]:
        """What has not arrived, from whichever source, or came from one that is doubted."""
        blocks = []
        for (source, _), expected in sorted(self._expected.items(), key=lambda item: item[0]):
            if source in doubted:
                blocks += [
                    expected.block(places, expected.tokens) for places in expected.places.spans
                ]
            else:
                blocks += [
                    expected.block(places, gap)
                    for places, gaps in expected.lacking()
                    for gap in gaps.spans
                ]
        return blocks

    def check(self) -> None:
        """A expected is open as long as something of it is missing."""
        for key, expected in self._expected.items():
            assert (key in self._open) is not expected.complete, key

    def __repr__(self) -> str:
        sources = {source for source, _ in self._expected}
        return f"<Ledger lacks {sum(map(self.missing, sources))} layers>"
