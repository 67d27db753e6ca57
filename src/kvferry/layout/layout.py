"""How one side shards and pages its cache, and which rank owns what.

Ownership is a product of intervals per (rank, group): layers from pipeline
stages, units from tensor parallelism, tokens from context parallelism, inside
one data-parallel replica. Sharding is either regular (``Parallel``) or stated
rank by rank (``ExplicitSharding``); both end as the same thing, shards, and nothing
downstream asks which it was.

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
    """How a page is laid out: token rows of heads, or head rows of tokens."""

    NHD = "nhd"
    HND = "hnd"


class Shard(msgspec.Struct, frozen=True):
    """What one rank holds of one group: layers x units x tokens.

    ``layers`` is a span of model layer numbers; the shard has those of the
    group's layers that lie inside. A rank may have several shards of one
    group if they differ in nothing but disjoint layers.
    """

    group: str
    layers: Span
    units: Span
    tokens: Tokens = ALL_TOKENS


Shards = tuple[tuple[Shard, ...], ...]


class Parallel(msgspec.Struct, frozen=True, tag="parallel"):
    """Regular sharding. ``stages`` gives the layers of each pipeline stage."""

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
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def lead(self) -> int:
        """The rank that knows the first token: last pipeline stage, tp 0."""
        return (self.pp - 1) * self.cp * self.tp

    def refusals(self, spec: CacheSpec) -> list[Reason]:
        """Why this sharding does not fit that model; empty where it does."""
        reasons = [
            Reason(
                ReasonCode.TP_UNITS,
                f"tp={self.tp} neither divides nor is divided by the {group.units} units (heads) "
                f"of group {group.name!r}; use a tp that does, or state ownership rank by rank",
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
        """The layers of one pipeline stage; an uneven split favours the first stages."""
        if self.stages:
            first = sum(self.stages[:stage])
            return Span(first, first + self.stages[stage])
        base, extra = divmod(num_layers, self.pp)
        first = stage * base + min(stage, extra)
        return Span(first, first + base + (stage < extra))

    def stage_spans(self, num_layers: int) -> tuple[Span, ...]:
        """The layers of each pipeline stage."""
        return tuple(self.stage_span(num_layers, stage) for stage in range(self.pp))

    def unit_span(self, units: int, tp_rank: int) -> Span:
        """The units of one tp rank; ``tp / units`` neighbours share one when tp is larger."""
        if units % self.tp == 0:
            share = units // self.tp
            return Span(tp_rank * share, (tp_rank + 1) * share)
        unit = tp_rank // (self.tp // units)
        return Span(unit, unit + 1)

    def shards(self, spec: CacheSpec) -> Shards:
        """Each rank's shards, in rank order."""
        return tuple(self.rank_shards(spec, rank) for rank in range(self.num_ranks))

    def rank_shards(self, spec: CacheSpec, rank: int) -> tuple[Shard, ...]:
        """One rank's shards, without working out those of the others."""
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
        # A state row belongs to the whole request: every cp rank has it.
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
    """Ownership stated rank by rank, for engines whose sharding no formula gives.

    ``lead`` is the rank that knows the first token.
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
        """Ranks of one replica."""
        return len(self.ranks)

    def refusals(self, spec: CacheSpec) -> list[Reason]:
        """Shards outside the model, or two of one rank that conflict."""
        groups = {group.name: group for group in spec.groups}
        reasons: list[Reason] = []
        for rank, shards in enumerate(self.ranks):
            for shard in shards:
                reasons += _outside(spec, groups, rank, shard)
            # In layer order only neighbours can overlap, and one comparison each will do.
            ordered = sorted(shards, key=lambda held: (held.group, held.layers))
            for one, two in itertools.pairwise(ordered):
                reasons += _conflict(rank, one, two)
        return reasons[:MAX_REASONS]

    def shards(self, spec: CacheSpec) -> Shards:
        """Each rank's shards, in rank order."""
        return tuple(self.rank_shards(spec, rank) for rank in range(self.num_ranks))

    def rank_shards(self, spec: CacheSpec, rank: int) -> tuple[Shard, ...]:
        """One rank's shards as stated, without those that have none of the group's layers."""
        return tuple(h for h in self.ranks[rank] if spec.group(h.group).layers_in(h.layers))

    def __str__(self) -> str:
        return f"{self.num_ranks} stated ranks"


def _outside(spec: CacheSpec, known: Mapping[str, Group], rank: int, shard: Shard) -> list[Reason]:
    """Why a stated shard names something the model does not have."""
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
    """Why two stated shards of one rank cannot stand together."""
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
    """One side: a cache, how it is sharded, how it is paged, and how often it is replicated."""

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
        """Ranks of one replica. A plan concerns one replica of each side."""
        return self.sharding.num_ranks

    @property
    def lead(self) -> int:
        """The rank whose closing message carries the metadata."""
        return self.sharding.lead

    def shards(self) -> Shards:
        """Each rank's shards, in rank order."""
        return self.sharding.shards(self.spec)

    def rank_shards(self, rank: int) -> tuple[Shard, ...]:
        """One rank's shards, without working out those of the others."""
        if not 0 <= rank < self.num_ranks:
            raise InputError(f"there is no rank {rank}; the layout has 0..{self.num_ranks - 1}")
        return self.sharding.rank_shards(self.spec, rank)

    def __str__(self) -> str:
        replicas = f" × {self.dp} replicas" if self.dp > 1 else ""
        return f"{self.sharding}{replicas}, page {self.page_tokens}, {self.order.upper()}"

    def __repr__(self) -> str:
        return f"<Layout {self}>"


def find_shard(shards: Sequence[Shard], group: str, layer: int) -> Shard:
    """The shard of one rank that contains that layer of that group."""
    for shard in shards:
        if shard.group == group and layer in shard.layers:
            return shard
    raise InputError(f"this rank holds nothing of group {group!r} in layer {layer}")
