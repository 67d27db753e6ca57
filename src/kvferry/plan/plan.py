"""The plan: which rank sends what to which rank, for a pair of layouts.

A plan has no addresses, pages or requests. It is a comparable value with a digest, which both sides
compare at the handshake. Both sides derive what is sent and what is expected from the same plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from kvferry.errors import InputError
from kvferry.layout.intervals import Span, cut
from kvferry.layout.layout import Layout, Shards, find_shard
from kvferry.layout.pages import page_period
from kvferry.layout.spec import CacheSpec, StateRow
from kvferry.layout.tokens import Tokens
from kvferry.plan.forms import EntryForms

# Part of every digest. Change it when the meaning of a move changes.
PLAN_FORMAT = "kvferry-plan-2"

# Number of requests whose blocks are cached. Sizes recur, and every step of a request needs them.
MAX_CACHED_BLOCKS = 1024

# Limit on a request, so that positions times strides fit in 64 bits.
MAX_TOKENS = 1 << 30


class Move(msgspec.Struct, frozen=True):
    """Layers, units and tokens of one group that one source sends to one target.

    ``layers`` is a span of model layer numbers, of which the move has those of the group. ``units``
    are counted over the whole model. ``source_unit`` and ``target_unit`` are the position of the
    first unit among those that each rank holds.
    """

    group: str
    source: int
    target: int
    layers: Span
    units: Span
    source_unit: int
    target_unit: int
    tokens: Tokens

    def __repr__(self) -> str:
        return (
            f"<Move {self.group} {self.source}→{self.target} "
            f"layers {self.layers} units {self.units} tokens {self.tokens}>"
        )


class Request(msgspec.Struct, frozen=True):
    """The size of a request: its tokens, and how many of them the target has cached."""

    num_tokens: int
    prefix: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= MAX_TOKENS:
            raise InputError(
                f"a request has between 0 and {MAX_TOKENS} tokens, not {self.num_tokens}"
            )
        if not 0 <= self.prefix <= self.num_tokens:
            raise InputError(
                f"a request of {self.num_tokens} tokens cannot have a prefix of {self.prefix}; "
                f"lower the prefix"
            )


class Block(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Some layers of a group for a span of tokens: a part of what a source sends a target."""

    group: str
    layers: Span
    tokens: Span

    def __repr__(self) -> str:
        return f"<{self.group} layers {self.layers} tokens {self.tokens}>"


class PageCycle(NamedTuple):
    """After ``num_tokens`` tokens, the next are as many pages further on in the same places."""

    num_tokens: int
    source_pages: int
    target_pages: int


class Plan:
    """All moves between one source replica and one target replica, in a canonical order."""

    def __init__(self, source: Layout, target: Layout, moves: tuple[Move, ...]) -> None:
        self.source = source
        self.target = target
        self.moves = moves
        self.forms = EntryForms(source, target)
        self._cached_blocks: dict[tuple[int, int, int, int], tuple[Block, ...]] = {}
        self._page_cycles: dict[tuple[int, int, str], PageCycle | None] = {}

    @property
    def spec(self) -> CacheSpec:
        """The cache specification, which is the same on both sides."""
        return self.source.spec

    @cached_property
    def digest(self) -> str:
        """A hash of the cache and the moves. Paging is not part of it."""
        shape = (self.source.num_ranks, self.target.num_ranks)
        content = msgspec.json.encode((PLAN_FORMAT, self.spec, shape, self.moves))
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    @cached_property
    def held(self) -> Shards:
        """The shards of each source rank."""
        return self.source.shards()

    @cached_property
    def wanted(self) -> Shards:
        """The shards of each target rank."""
        return self.target.shards()

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], tuple[Move, ...]]:
        pairs: dict[tuple[int, int], list[Move]] = {}
        for move in self.moves:
            pairs.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in pairs.items()}

    def page_cycle(self, source: int, target: int, group: str) -> PageCycle | None:
        """Return after how many tokens the places in pages of a pair's tokens repeat.

        None if the pair has moves of state rows, or moves that begin or end at a token.
        """
        key = source, target, group
        if key not in self._page_cycles:
            self._page_cycles[key] = self._find_page_cycle(*key)
        return self._page_cycles[key]

    def _find_page_cycle(self, source: int, target: int, group: str) -> PageCycle | None:
        moves = [move for move in self.between(source, target) if move.group == group]
        is_state = isinstance(self.spec.group(group).kind, StateRow)
        if is_state or not moves or any(move.tokens.is_bounded for move in moves):
            return None
        layer = moves[0].layers.first
        ends = (
            (self.source, find_shard(self.held[source], group, layer)),
            (self.target, find_shard(self.wanted[target], group, layer)),
        )
        patterns = [move.tokens.pattern.period for move in moves]
        num_tokens = math.lcm(*patterns, *(page_period(*end) for end in ends))
        pages = (
            shard.tokens.pattern.below(num_tokens) // layout.page_entries(self.spec.group(group))
            for layout, shard in ends
        )
        return PageCycle(num_tokens, *pages)

    @cached_property
    def _targets(self) -> dict[int, tuple[int, ...]]:
        """The targets of each source that sends something, ascending."""
        return _grouped((source, target) for source, target in self._by_pair)

    @cached_property
    def _sources(self) -> dict[int, tuple[int, ...]]:
        """The sources of each target that receives something, ascending."""
        return _grouped((target, source) for source, target in self._by_pair)

    def between(self, source: int, target: int) -> tuple[Move, ...]:
        """Return the moves from ``source`` to ``target``."""
        return self._by_pair.get((source, target), ())

    def targets_of(self, source: int) -> tuple[int, ...]:
        """Return the targets that ``source`` sends to, ascending."""
        return self._targets.get(source, ())

    def sources_of(self, target: int) -> tuple[int, ...]:
        """Return the sources that ``target`` receives from, ascending."""
        return self._sources.get(target, ())

    @cached_property
    def _contacts(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """The contacts of each target, and the audience of each source."""
        targets, lead = range(self.target.num_ranks), self.source.lead
        working = {*self._targets, lead}
        idle = [rank for rank in range(self.source.num_ranks) if rank not in working]
        pairs = [
            (target, source)
            for target in targets
            for source in {*self.sources_of(target), lead, *idle[target :: len(targets)]}
        ]
        return _grouped(pairs), _grouped((source, target) for target, source in pairs)

    def contacts(self, target: int) -> tuple[int, ...]:
        """Return the sources to which ``target`` sends an Offer for each room.

        These are the sources that send it something, the lead, which has the metadata, and a
        share of the idle sources: they hold pages too, and must learn when to release them.
        """
        return self._contacts[0][target]

    def audience(self, source: int) -> tuple[int, ...]:
        """Return the targets that have ``source`` among their ``contacts``."""
        return self._contacts[1][source]

    def blocks(self, source: int, target: int, request: Request) -> tuple[Block, ...]:
        """Return what ``source`` sends ``target`` for a request, as disjoint blocks."""
        key = source, target, request.num_tokens, request.prefix
        cached = self._cached_blocks.get(key)
        if cached is None:
            if len(self._cached_blocks) >= MAX_CACHED_BLOCKS:
                self._cached_blocks.clear()
            cached = self.blocks_of(self.between(source, target), request)
            self._cached_blocks[key] = cached
        return cached

    def blocks_of(self, moves: Sequence[Move], request: Request) -> tuple[Block, ...]:
        """Return what these moves of one pair carry for a request, as disjoint blocks."""
        spans: dict[str, list[Span]] = {}
        for move in moves:
            if self.tokens_of(move, request).num_tokens:
                spans.setdefault(move.group, []).append(move.layers)
        return tuple(
            Block(name, layers, self.spec.group(name).owed(request.num_tokens, request.prefix))
            for name, mine in spans.items()
            for layers in cut(mine)
        )

    def tokens_of(self, move: Move, request: Request) -> Tokens:
        """Return the positions of a request that ``move`` carries: a finite set, possibly empty."""
        group = self.spec.group(move.group)
        return move.tokens.clip(group.owed(request.num_tokens, request.prefix))

    def bytes_of(self, move: Move, request: Request) -> int:
        """Return the bytes of a move for a request."""
        group = self.spec.group(move.group)
        cells = len(group.layers_in(move.layers)) * len(move.units)
        return self.tokens_of(move, request).num_tokens * cells * group.unit_bytes

    def payload_bytes(self, request: Request) -> int:
        """Return the bytes of a request, over all targets of one replica."""
        return sum(self.bytes_of(move, request) for move in self.moves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        mine = (self.source, self.target, self.moves)
        return mine == (other.source, other.target, other.moves)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.source.sharding} → {self.target.sharding}, "
            f"{len(self.moves)} moves, {self.digest[:12]}>"
        )

    def __str__(self) -> str:
        # Imported here, because ``describe`` imports this module.
        from kvferry.plan.describe import as_text  # noqa: PLC0415

        return as_text(self)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Return the second numbers for each first number, ascending."""
    groups: dict[int, list[int]] = {}
    for key, value in sorted(pairs):
        groups.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in groups.items()}
