"""The plan: who sends what to whom, for a pair of layouts.

A plan knows no addresses, pages or requests. It is a value: comparable,
printable, with a digest that both sides compare at the handshake. Sender and
receiver both read their duties from it, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from kvferry.errors import InputError
from kvferry.layout.intervals import ALL_TOKENS, Span, Tokens, cut
from kvferry.layout.layout import Layout, Shards
from kvferry.layout.spec import CacheSpec, StateRow

# Part of every digest: bump it when the meaning of a move changes.
PLAN_FORMAT = "kvferry-plan-1"

# Requests whose blocks a plan remembers: those of one size recur, and each of their steps asks.
MAX_KNOWN_BLOCKS = 1024

# A bound on a request, so that positions times strides stay within 64 bits.
MAX_TOKENS = 1 << 30


class Move(msgspec.Struct, frozen=True):
    """One block that one source owes one target.

    ``units`` count over the whole model; ``source_unit`` and ``target_unit``
    are where the block begins among the units each rank holds. ``layers`` is a
    span of model layer numbers: the move has the group's layers inside it.
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
    """The two numbers of a request that geometry needs: its length, and what is cached."""

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
    """A part of what a pair owes: some layers of a group for a stretch of tokens."""

    group: str
    layers: Span
    tokens: Span

    def __repr__(self) -> str:
        return f"<{self.group} layers {self.layers} tokens {self.tokens}>"


class Plan:
    """Every move between one source replica and one target replica, in a canonical order."""

    def __init__(self, source: Layout, target: Layout, moves: tuple[Move, ...]) -> None:
        self.source = source
        self.target = target
        self.moves = moves
        self._known_blocks: dict[tuple[int, int, int, int], tuple[Block, ...]] = {}

    @property
    def spec(self) -> CacheSpec:
        """The cache that travels. Both sides describe the same one."""
        return self.source.spec

    @cached_property
    def digest(self) -> str:
        """A fingerprint of what travels and who carries it; paging is not part of it."""
        shape = (self.source.num_ranks, self.target.num_ranks)
        content = msgspec.json.encode((PLAN_FORMAT, self.spec, shape, self.moves))
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    @cached_property
    def held(self) -> Shards:
        """What each source rank holds."""
        return self.source.shards()

    @cached_property
    def wanted(self) -> Shards:
        """What each target rank holds, and so wants."""
        return self.target.shards()

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], tuple[Move, ...]]:
        pairs: dict[tuple[int, int], list[Move]] = {}
        for move in self.moves:
            pairs.setdefault((move.source, move.target), []).append(move)
        return {pair: tuple(moves) for pair, moves in pairs.items()}

    @cached_property
    def _shared(self) -> frozenset[tuple[int, int, str]]:
        """Pairs and groups of which a move has state, or some of the tokens only."""
        groups = {group.name: group for group in self.spec.groups}
        return frozenset(
            (move.source, move.target, move.group)
            for move in self.moves
            if move.tokens != ALL_TOKENS or isinstance(groups[move.group].kind, StateRow)
        )

    def has_every_token(self, source: int, target: int, group: str) -> bool:
        """Whether both ranks have all tokens of a group, so that its blocks are whole."""
        return (source, target, group) not in self._shared

    @cached_property
    def _targets(self) -> dict[int, tuple[int, ...]]:
        """For each source that works, its targets, ascending."""
        return _grouped((source, target) for source, target in self._by_pair)

    @cached_property
    def _sources(self) -> dict[int, tuple[int, ...]]:
        """For each target that gets something, its sources, ascending."""
        return _grouped((target, source) for source, target in self._by_pair)

    def between(self, source: int, target: int) -> tuple[Move, ...]:
        """What ``source`` owes ``target``; empty where it owes nothing."""
        return self._by_pair.get((source, target), ())

    def targets_of(self, source: int) -> tuple[int, ...]:
        """The targets that ``source`` sends to, ascending."""
        return self._targets.get(source, ())

    def sources_of(self, target: int) -> tuple[int, ...]:
        """The sources that ``target`` receives from, ascending."""
        return self._sources.get(target, ())

    @cached_property
    def _idle(self) -> tuple[int, ...]:
        working = {*self._targets, self.source.lead}
        return tuple(rank for rank in range(self.source.num_ranks) if rank not in working)

    def contacts(self, target: int) -> tuple[int, ...]:
        """The sources that ``target`` tells of each room, and hears a Close from.

        Those that owe it something, the lead, which has the metadata, and its
        share of the sources that owe nothing to anyone: they hold pages too,
        and must learn when to let go of them.
        """
        idle = self._idle[target :: self.target.num_ranks]
        return tuple(sorted({*self.sources_of(target), self.source.lead, *idle}))

    def audience(self, source: int) -> tuple[int, ...]:
        """The targets that tell ``source`` of each room: ``contacts`` seen from its side."""
        if source == self.source.lead:
            return tuple(range(self.target.num_ranks))
        if source in self._idle:
            return (self._idle.index(source) % self.target.num_ranks,)
        return self.targets_of(source)

    def blocks(self, source: int, target: int, request: Request) -> tuple[Block, ...]:
        """Everything that ``source`` owes ``target`` for one request, in disjoint blocks."""
        key = source, target, request.num_tokens, request.prefix
        known = self._known_blocks.get(key)
        if known is None:
            if len(self._known_blocks) >= MAX_KNOWN_BLOCKS:
                self._known_blocks.clear()
            known = self.blocks_of(self.between(source, target), request)
            self._known_blocks[key] = known
        return known

    def blocks_of(self, moves: Sequence[Move], request: Request) -> tuple[Block, ...]:
        """Everything that these moves of one pair carry for one request, in disjoint blocks."""
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
        """The positions of one request that ``move`` carries, finite and maybe none."""
        group = self.spec.group(move.group)
        return move.tokens.clip(group.owed(request.num_tokens, request.prefix))

    def bytes_of(self, move: Move, request: Request) -> int:
        """The payload of one move for one request."""
        group = self.spec.group(move.group)
        cells = len(group.layers_in(move.layers)) * len(move.units)
        return self.tokens_of(move, request).num_tokens * cells * group.unit_bytes

    def payload_bytes(self, request: Request) -> int:
        """The payload of one request, over all targets of one replica."""
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
        # Imported here because describing a plan needs the plan.
        from kvferry.plan.describe import as_text  # noqa: PLC0415

        return as_text(self)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """What each first number is paired with, ascending."""
    groups: dict[int, list[int]] = {}
    for key, value in sorted(pairs):
        groups.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in groups.items()}
