"""How one side shards and pages its cache, and which rank owns what.

What a rank owns of a group is a product of intervals inside one data-parallel replica: layers from
pipeline stages, units from tensor parallelism, tokens from context parallelism. Sharding is either
regular (``Parallel``) or stated rank by rank (``ExplicitSharding``). Both give shards.

Rank order inside a replica: ``((pp_rank * copies + copy) * cp + cp_rank) * tp + tp_rank``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from kvferry.errors import InputError, Reason, ReasonCode, Refused
from kvferry.layout.intervals import Span
from kvferry.layout.spec import CacheSpec, Group, StateRow
from kvferry.layout.tokens import ALL_TOKENS, Tokens

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
    """The part of one group that one rank holds: layers × units × tokens.

    ``layers`` is a span of model layer numbers, of which the shard has those of the group. A rank
    may have several shards of one group that differ only in their disjoint layers.
    """

    group: str
    layers: Span
    units: Span
    tokens: Tokens = ALL_TOKENS


Shards = tuple[tuple[Shard, ...], ...]


class Parallel(msgspec.Struct, frozen=True, tag="parallel"):
    """Regular sharding. ``stages`` are the numbers of layers of each pipeline stage.

    Tokens are dealt out to ``cp * dcp`` ranks, which take turns at ``interleave`` tokens. ``cp``
    counts ranks beside those of a TP group (prefill context parallelism that divides the cache).
    ``dcp`` counts neighbouring ranks inside it that have the same units (decode context
    parallelism). State rows belong to the whole request: each CP rank has the same, and units are
    dealt out to all TP ranks.

    Each of ``copies`` ranks holds the same (prefill context parallelism that divides only work).
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    stages: tuple[int, ...] = ()
    dcp: int = 1
    interleave: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dcp", "interleave", "copies"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_ranks > MAX_RANKS or self.num_token_shares > MAX_CP:
            raise InputError(
                f"tp x pp x cp x copies is {self.num_ranks} and cp x dcp "
                f"{self.num_token_shares}; at most {MAX_RANKS} ranks and {MAX_CP} shares of the "
                f"tokens are supported"
            )
        if self.tp % self.dcp:
            raise InputError(
                f"dcp={self.dcp} must divide tp={self.tp}, because its ranks are TP ranks"
            )
        if self.interleave > MAX_PAGE_TOKENS:
            raise InputError(f"interleave is at most {MAX_PAGE_TOKENS}, not {self.interleave}")

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.tp * self.pp * self.cp * self.copies

    @property
    def num_token_shares(self) -> int:
        """Number of parts into which context parallelism divides the tokens."""
        return self.cp * self.dcp

    @property
    def lead(self) -> int:
        """The rank that samples the first token: TP rank 0 of the last pipeline stage."""
        return self.num_ranks // self.pp * (self.pp - 1)

    def refusals(self, spec: CacheSpec) -> list[Reason]:
        """Return why this sharding does not fit a cache, or an empty list."""
        reasons = [
            Reason(
                ReasonCode.TP_UNITS,
                f"tp={self.tp}{f' over dcp={self.dcp}' if shared > 1 else ''} neither divides nor "
                f"is divided by the {group.units} units (heads) of group {group.name!r}; use a tp "
                f"that does, or an ExplicitSharding",
            )
            for group in spec.groups
            if (shared := self._ranks_per_part(group))
            and group.units % (self.tp // shared)
            and (self.tp // shared) % group.units
        ]
        reasons += [
            Reason(
                ReasonCode.INTERLEAVE,
                f"ranks take turns at {self.interleave} tokens, which is no multiple of the "
                f"{group.tokens_per_entry} tokens of an entry of group {group.name!r}; use one",
            )
            for group in spec.groups
            if self.num_token_shares > 1 and self.interleave % group.tokens_per_entry
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

    def _ranks_per_part(self, group: Group) -> int:
        """Return how many neighbouring TP ranks have the same units, and share their tokens."""
        return 1 if isinstance(group.kind, StateRow) else self.dcp

    def _units(self, group: Group, tp_rank: int) -> Span:
        shared = self._ranks_per_part(group)
        return _unit_span(group.units, self.tp // shared, tp_rank // shared)

    def unit_span(self, units: int, tp_rank: int) -> Span:
        """Return the units of a TP rank. If tp is larger, ``tp / units`` ranks replicate each."""
        return _unit_span(units, self.tp, tp_rank)

    def rank_shards(self, spec: CacheSpec, rank: int) -> tuple[Shard, ...]:
        """Return one rank's shards, without computing those of the others."""
        stage = self.stage_span(spec.num_layers, rank // (self.tp * self.cp * self.copies))
        mine = self.tokens(rank)
        return tuple(
            Shard(group.name, stage, self._units(group, rank % self.tp), tokens)
            for group in spec.groups
            if group.layers_in(stage)
            and (
                tokens := ALL_TOKENS if isinstance(group.kind, StateRow) else _entries(group, mine)
            )
        )

    def tokens(self, rank: int) -> Tokens:
        """Return the tokens of a rank in groups that follow tokens."""
        rest, tp_rank = divmod(rank, self.tp)
        # vLLM, which may have both, lets CP ranks vary first.
        share = tp_rank % self.dcp * self.cp + rest % self.cp
        return Tokens.interleaved(share, self.num_token_shares, self.interleave)

    def __str__(self) -> str:
        sizes = (("PP", self.pp), ("CP", self.cp), ("DCP", self.dcp))
        parts = [f"TP{self.tp}", *(f"{name}{size}" for name, size in sizes if size > 1)]
        if self.num_token_shares > 1 and self.interleave > 1:
            parts.append(f"interleave {self.interleave}")
        if self.copies > 1:
            parts.append(f"{self.copies} copies")
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
        """Return one rank's shards, without those that have none of the group's entries."""
        return tuple(
            replace(held, tokens=tokens)
            for held in self.ranks[rank]
            if (group := spec.group(held.group)).layers_in(held.layers)
            and (tokens := _entries(group, held.tokens))
        )

    def __str__(self) -> str:
        return f"{self.num_ranks} stated ranks"


def _unit_span(units: int, tp: int, tp_rank: int) -> Span:
    if units % tp == 0:
        share = units // tp
        return Span(tp_rank * share, (tp_rank + 1) * share)
    unit = tp_rank // (tp // units)
    return Span(unit, unit + 1)


def _entries(group: Group, tokens: Tokens) -> Tokens | None:
    """Return those of some tokens that have an entry, or None."""
    return tokens if group.tokens_per_entry == 1 else tokens.intersect(group.entries)


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
    """One side: its cache, sharding, paging and number of data-parallel replicas.

    ``packed`` names groups whose tensors follow each other in every unit of a token, such as K and
    V in one row. ``transposed`` names tensors, as ``group.tensor``, that a page keeps by unit,
    element and token, so that an element's tokens are contiguous. ``group_pages`` are the tokens of
    a page of groups that differ from ``page_tokens``.
    """

    spec: CacheSpec
    sharding: Sharding = Parallel()
    dp: int = 1
    page_tokens: int = 16
    order: Order = Order.NHD
    packed: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    group_pages: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.dp <= MAX_RANKS:
            raise InputError(f"dp must be between 1 and {MAX_RANKS}, not {self.dp}")
        self._check_pages()
        self._check_forms()
        reasons = self.sharding.refusals(self.spec)
        if reasons:
            raise Refused(reasons)

    def _check_pages(self) -> None:
        names = [name for name, _ in self.group_pages]
        for name in names:
            if isinstance(self.spec.group(name).kind, StateRow) or names.count(name) > 1:
                raise InputError(
                    f"group {name!r} has a row per request, or two page sizes; give each group of "
                    f"tokens at most one"
                )
        for size in (self.page_tokens, *(size for _, size in self.group_pages)):
            if not 1 <= size <= MAX_PAGE_TOKENS:
                raise InputError(f"a page holds between 1 and {MAX_PAGE_TOKENS} tokens, not {size}")
        for group in self.spec.groups:
            if self.tokens_per_page(group) % group.tokens_per_entry:
                raise InputError(
                    f"a page of {self.tokens_per_page(group)} tokens does not hold whole entries "
                    f"of {group.tokens_per_entry} tokens, as group {group.name!r} has; use a "
                    f"multiple"
                )

    def _check_forms(self) -> None:
        for name in self.packed:
            self.spec.group(name)
        known = {
            f"{group.name}.{tensor.name}": (group, tensor)
            for group in self.spec.groups
            for tensor in group.tensors
        }
        for name in self.transposed:
            if name not in known:
                raise InputError(f"no tensor {name!r} in this cache; it has {', '.join(known)}")
            group, tensor = known[name]
            if isinstance(group.kind, StateRow) or tensor.parts or group.name in self.packed:
                raise InputError(
                    f"{name} can't be transposed, because it has no tokens, has parts of several "
                    f"types or shares its rows with another tensor; leave it out"
                )

    def is_transposed(self, group: str, tensor: str) -> bool:
        """Return whether a page keeps an element's tokens next to each other."""
        return f"{group}.{tensor}" in self.transposed

    def tokens_per_page(self, group: Group) -> int:
        """Return the tokens of a page of a group that follows tokens."""
        for name, size in self.group_pages:
            if name == group.name:
                return size
        return self.page_tokens

    def page_entries(self, group: Group) -> int:
        """Return how many entries of a group a page holds; 1 for state rows."""
        if isinstance(group.kind, StateRow):
            return 1
        return self.tokens_per_page(group) // group.tokens_per_entry

    @property
    def smallest_page(self) -> int:
        """The tokens of a page of the groups that have the most pages."""
        followed = (group for group in self.spec.groups if not isinstance(group.kind, StateRow))
        return min(map(self.tokens_per_page, followed), default=self.page_tokens)

    @property
    def pages_text(self) -> str:
        """The page sizes in a few words: ``page 64``, or ``page 64 (window 256)``."""
        own = ", ".join(f"{name} {size}" for name, size in self.group_pages)
        return f"page {self.page_tokens} ({own})" if own else f"page {self.page_tokens}"

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
        return f"{self.sharding}{replicas}, {self.pages_text}, {self.order.upper()}"

    def __repr__(self) -> str:
        return f"<Layout {self}>"


def find_shard(shards: Sequence[Shard], group: str, layer: int) -> Shard:
    """Return the one of a rank's shards that has this layer of this group."""
    for shard in shards:
        if shard.group == group and layer in shard.layers:
            return shard
    raise InputError(f"this rank holds nothing of group {group!r} in layer {layer}")
