"""How one side shards and pages its cache, and which rank owns what.

What a rank owns of a group is a product of intervals inside one data-parallel replica: layers from
pipeline stages, units from tensor parallelism, tokens from context parallelism. Sharding is either
regular (``Parallel``) or stated rank by rank (``ExplicitSharding``). Both give shards.

Rank order inside a replica: ``(pp_rank * cp + cp_rank) * tp + tp_rank``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from kvferry.errors import InputError, Reason, ReasonCode, Refused
from kvferry.layout.intervals import ALL_TOKENS, Span, Tokens
from kvferry.layout.spec import CacheSpec, Group, StateRow

MAX_RANKS = 4096
MAX_CP = 256
MAX_PAGE_TOKENS = 1 << 20
MAX_SHARDS = 1 << 16
MAX_REASONS = 16
SHOWN_STAGES = 16


class Order(StrEnum):
    """How a page is laid out: tokens before heads (NHD), or heads before tokens (HND)."""

    NHD = "nhd"
    HND = "hnd"


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds of one group: layers × units × tokens.

    ``layers`` is a span of model layer numbers, of which the shard has those of the group. A rank
    may have several shards of one group that differ only in their disjoint layers.
    """

    group: str
    layers: Span
    units: Span
    tokens: Tokens = ALL_TOKENS


Shards = tuple[tuple[Shard, ...], ...]


class Parallel(msgspec.Struct, frozen=True, tag="parallel"):
    """Regular sharding. ``stages`` are the numbers of layers of each pipeline stage."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        if self.num_ranks > MAX_RANKS or self.cp > MAX_CP:
            raise InputError(
                f"tp x pp x cp is {self.num_ranks} and cp {self.cp}; "
                f"at most {MAX_RANKS} ranks and cp {MAX_CP} are supported"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def lead(self) -> int:
        """The rank that samples the first token: TP rank 0 of the last pipeline stage."""
        return (self.pp - 1) * self.cp * self.tp

    def refusals(self, spec: CacheSpec) -> list[Reason]:
        """Return why this sharding does not fit a cache, or an empty list."""
        reasons = [
            Reason(
                ReasonCode.TP_UNITS,
                f"tp={self.tp} neither divides nor is divided by the {group.units} units (heads) "
                f"of group {group.name!r}; use a tp that does, or an ExplicitSharding",
            )
            for group in spec.groups
            if group.units % self.tp and self.tp % group.units
        ]
        if self.pp > spec.num_layers:
            reasons.append(
                Reason(
                    ReasonCode.PP_LAYERS,
                    f"pp={self.pp} is above the model's {spec.num_layers} layers; lower pp",
                )
            )
        if self.stages and not self._stages_add_up(spec.num_layers):
            shown = "+".join(map(str, self.stages[:SHOWN_STAGES]))
            more = "+…" if len(self.stages) > SHOWN_STAGES else ""
            reasons.append(
                Reason(
                    ReasonCode.STAGES,
                    f"stages {shown}{more} must be pp={self.pp} positive "
                    f"numbers that add up to the model's {spec.num_layers} layers",
                )
            )
        return reasons

    def _stages_add_up(self, num_layers: int) -> bool:
        positive = all(count >= 1 for count in self.stages)
        return len(self.stages) == self.pp and positive and sum(self.stages) == num_layers

    def stage_span(self, num_layers: int, stage: int) -> Span:
        """Return the layers of a pipeline stage. An uneven split gives the first stages more."""
        if self.stages:
            first = sum(self.stages[:stage])
            return Span(first, first + self.stages[stage])
        base, extra = divmod(num_layers, self.pp)
        first = stage * base + min(stage, extra)
        return Span(first, first + base + (stage < extra))

    def stage_spans(self, num_layers: int) -> tuple[Span, ...]:
        """Return the layers of each pipeline stage."""
        return tuple(self.stage_span(num_layers, stage) for stage in range(self.pp))

    def unit_span(self, units: int, tp_rank: int) -> Span:
        """Return the units of a TP rank. If tp is larger, ``tp / units`` ranks replicate each."""
        if units % self.tp == 0:
            share = units // self.tp
            return Span(tp_rank * share, (tp_rank + 1) * share)
        unit = tp_rank // (self.tp // units)
        return Span(unit, unit + 1)

    def rank_shards(self, spec: CacheSpec, rank: int) -> tuple[Shard, ...]:
        """Return one rank's shards, without computing those of the others."""
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, cp_rank = divmod(rest, self.cp)
        stage = self.stage_span(spec.num_layers, pp_rank)
        return tuple(
            Shard(
                group.name,
                stage,
                self.unit_span(group.units, tp_rank),
                self._tokens(group, cp_rank),
            )
            for group in spec.groups
            if group.layers_in(stage)
        )

    def _tokens(self, group: Group, cp_rank: int) -> Tokens:
        # A state row belongs to the whole request, so every CP rank has it.
        if isinstance(group.kind, StateRow):
            return ALL_TOKENS
        return Tokens(cp_rank, None, self.cp)

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"]
        if self.pp > 1:
            parts.append(f"PP{self.pp}")
        if self.cp > 1:
            parts.append(f"CP{self.cp}")
        return "·".join(parts)


class ExplicitSharding(msgspec.Struct, frozen=True, tag="stated"):
    """Shards stated rank by rank, for engines with irregular sharding.

    ``lead`` is the rank that samples the first token.
    """

    ranks: Shards
    lead: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.lead < max(1, len(self.ranks)):
            raise InputError(f"lead {self.lead} is not among the {len(self.ranks)} stated ranks")
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise InputError(f"state the shards of 1 to {MAX_RANKS} ranks, not {len(self.ranks)}")
        if sum(map(len, self.ranks)) > MAX_SHARDS:
            raise InputError(f"state at most {MAX_SHARDS} shards; join neighbouring layers")

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one replica."""
        return len(self.ranks)

    def refusals(self, spec: CacheSpec) -> list[Reason]:
        """Return why these shards do not fit a cache, or an empty list."""
        groups = {group.name: group for group in spec.groups}
        reasons: list[Reason] = []
        for rank, shards in enumerate(self.ranks):
            for shard in shards:
                reasons += _outside(spec, groups, rank, shard)
            # Sorted by layers, only neighbours can overlap.
            ordered = sorted(shards, key=lambda held: (held.group, held.layers))
            for one, two in itertools.pairwise(ordered):
                reasons += _conflict(rank, one, two)
        return reasons[:MAX_REASONS]

    def rank_shards(self, spec: CacheSpec, rank: int) -> tuple[Shard, ...]:
        """Return one rank's shards, without those that have none of the group's layers."""
        return tuple(h for h in self.ranks[rank] if spec.group(h.group).layers_in(h.layers))

    def __str__(self) -> str:
        return f"{self.num_ranks} stated ranks"


def _outside(spec: CacheSpec, known: Mapping[str, Group], rank: int, shard: Shard) -> list[Reason]:
    """Return why a shard lies outside the model, if it does."""
    if shard.group not in known:
        wrong = f"group {shard.group!r}, but the cache has {', '.join(known)}"
    elif shard.units.end > known[shard.group].units or not len(shard.units):
        wrong = (
            f"units {shard.units} of group {shard.group!r}, "
            f"which has [0, {known[shard.group].units})"
        )
    elif shard.layers.end > spec.num_layers:
        wrong = f"layers {shard.layers}, but the model has [0, {spec.num_layers})"
    else:
        return []
    return [Reason(ReasonCode.OUTSIDE, f"rank {rank} states {wrong}; state only what exists")]


def _conflict(rank: int, one: Shard, two: Shard) -> list[Reason]:
    """Return why two shards of one rank conflict, if they do."""
    if one.group != two.group:
        return []
    both = one.layers.intersect(two.layers)
    if len(both):
        message = f"rank {rank} states group {one.group!r} twice for layers {both}; state it once"
        return [Reason(ReasonCode.OVERLAP, message)]
    if (one.units, one.tokens) != (two.units, two.tokens):
        message = (
            f"rank {rank} states other units or tokens of group {one.group!r} for layers "
            f"{one.layers} than for {two.layers}; split the group by layers"
        )
        return [Reason(ReasonCode.NOT_PRODUCT, message)]
    return []


Sharding = Parallel | ExplicitSharding


class Layout(msgspec.Struct, frozen=True):
    """One side: its cache, sharding, paging and number of data-parallel replicas."""

    spec: CacheSpec
    sharding: Sharding = Parallel()
    dp: int = 1
    page_tokens: int = 16
    order: Order = Order.NHD

    def __post_init__(self) -> None:
        if not 1 <= self.dp <= MAX_RANKS:
            raise InputError(f"dp must be between 1 and {MAX_RANKS}, not {self.dp}")
        if not 1 <= self.page_tokens <= MAX_PAGE_TOKENS:
            raise InputError(
                f"a page holds between 1 and {MAX_PAGE_TOKENS} tokens, not {self.page_tokens}"
            )
        reasons = self.sharding.refusals(self.spec)
        if reasons:
            raise Refused(reasons)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one replica. A plan is for one replica of each side."""
        return self.sharding.num_ranks

    @property
    def lead(self) -> int:
        """The rank whose Close message carries the metadata."""
        return self.sharding.lead

    def shards(self) -> Shards:
        """Return each rank's shards, in rank order."""
        ranks = range(self.num_ranks)
        return tuple(self.sharding.rank_shards(self.spec, rank) for rank in ranks)

    def rank_shards(self, rank: int) -> tuple[Shard, ...]:
        """Return one rank's shards, without computing those of the others."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"there is no rank {rank}; the layout has 0..{self.num_ranks - 1}")
        return self.sharding.rank_shards(self.spec, rank)

    def __str__(self) -> str:
        replicas = f" × {self.dp} replicas" if self.dp > 1 else ""
        return f"{self.sharding}{replicas}, page {self.page_tokens}, {self.order.upper()}"

    def __repr__(self) -> str:
        return f"<Layout {self}>"


def find_shard(shards: Sequence[Shard], group: str, layer: int) -> Shard:
    """Return the one of a rank's shards that has this layer of this group."""
    for shard in shards:
        if shard.group == group and layer in shard.layers:
            return shard
    raise InputError(f"this rank holds nothing of group {group!r} in layer {layer}")
