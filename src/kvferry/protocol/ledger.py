"""A target's record of arrivals, kept as coverage instead of a message count.

The expected blocks follow from the plan, from which each source also derives what it sends.
Repeated, overlapping and reordered blocks are harmless, and so is any cut of the chunks by
tokens or layers.

Layers are counted by their place in the group, not by their number in the model, so that
consecutive layers of a group are adjacent.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvferry.layout.coverage import Coverage
from kvferry.layout.intervals import Span, SpanSet
from kvferry.layout.spec import Group
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.messages import Close
from kvferry.protocol.outcome import Failure, FailureCode


@dataclass(slots=True, eq=False)
class ExpectedBlocks:
    """Blocks that one source owes of one group, and their coverage so far."""

    group: Group
    tokens: Span
    places: SpanSet = field(default_factory=SpanSet)
    arrived: Coverage = field(default_factory=Coverage)

    @property
    def complete(self) -> bool:
        """Whether all of them have arrived."""
        return all(self.arrived.covers(places, self.tokens) for places in self.places.spans)

    def lacking(self) -> list[tuple[Span, SpanSet]]:
        """Return the missing tokens, by places."""
        return [
            (strip.layers, strip.tokens)
            for places in self.places.spans
            for strip in self.arrived.gaps(places, self.tokens)
        ]

    def block(self, places: Span, tokens: Span) -> Block:
        """Return a block in layer numbers instead of places."""
        return Block(self.group.name, self.group.layers_at(places), tokens)


class Ledger:
    """Arrivals of one room at one target, and the sources that have not closed yet.

    Every contact in the plan must close the room, even a source that owes nothing.
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
        """Return how the request that a source computed differs from the one asked for.

        Either both sides give a digest, or neither does.
        """
        if close.num_tokens != self._num_tokens:
            text = f"prefill has {close.num_tokens} tokens, decode {self._num_tokens}"
            return Failure.of(FailureCode.TOKENS_DIFFER, text)
        if close.digest == self._digest:
            return None
        if close.digest and self._digest:
            text = (
                "prefill computed another request than the one decode asked for, so its cache is "
                "not used; give each request a room id of its own"
            )
        else:
            lacking = "prefill" if self._digest else "decode"
            text = f"{lacking} gave no digest of its request; give one on both sides, or on neither"
        return Failure.of(FailureCode.CONTENT_DIFFERS, text)

    def close(self, source: int) -> None:
        """Record that a source has written everything it owes."""
        self._unclosed.discard(source)

    def owes(self, source: int, block: Block) -> bool:
        """Whether the source owes the whole block."""
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
        """Return the number of layers, over all groups, that are incomplete from one source."""
        return sum(
            len(places)
            for key in self._open
            if key[0] == source
            for places, _ in self._expected[key].lacking()
        )

    def lacking(self, doubted: Container[int] = ()) -> list[Block]:
        """Return the blocks that are missing, and all blocks of the ``doubted`` sources."""
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
        """Check that exactly the incomplete entries are open."""
        for key, expected in self._expected.items():
            assert (key in self._open) is not expected.complete, key
