"""The planner: makes a plan from two layouts by interval intersection.

For each group, the boundaries of all shards cut the coordinates into cells: a layer interval, a
unit interval and a token class. Every source of a cell holds all of it, and every target needs all
of it. No step asks which side has more ranks, or whether anything is replicated.

**Sharing.** With k sources and n targets of a cell of L layers, the targets' demands form a line of
n·L layers, which is cut into k parts, one for each source in rank order. That pairs sources and
targets if k = n, splits the layers evenly if n = 1, and always gives the fewest moves of an even
split. If k does not divide the line, the remaining layers go to the sources with the least load so
far, one each. So sources that hold the same shards differ by at most one layer of one cell,
over any number of cells.

Tokens are never enumerated (``token_classes``).
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import or_
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.errors import ReasonCode, Refused
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Shard
from kvferry.layout.match import mismatches
from kvferry.layout.spec import Group
from kvferry.layout.tokens import Tokens
from kvferry.plan.plan import Move, Plan
from kvferry.plan.token_classes import token_classes

# Limit on the cells of one group: a hostile layout must not take minutes to plan.
MAX_CELLS = 1 << 17


class _RankShard(NamedTuple):
    rank: int
    shard: Shard


class _Cell(NamedTuple):
    """Part of a group that each of its sources holds and each of its targets needs.

    ``weight`` counts its tokens in a period that all cells of the group share.
    """

    layers: tuple[int, ...]
    units: Span
    tokens: Tokens
    weight: int
    sources: list[_RankShard]
    targets: list[_RankShard]


def reshard(source: Layout, target: Layout) -> Plan:
    """Return the plan that gives every rank of ``target`` its shards from ``source``.

    Raises ``Refused`` with every reason if the two layouts are incompatible.
    """
    reasons = mismatches(source.spec, target.spec)
    if reasons:
        raise Refused(reasons)
    held, wanted = source.shards(), target.shards()
    moves: list[Move] = []
    for group in source.spec.groups:
        sources, targets = _of_group(held, group.name), _of_group(wanted, group.name)
        _check_complete(group, targets)
        loads: Counter[int] = Counter()
        raw = (
            move
            for cell in _cells(group, sources, targets)
            for move in _share(group.name, cell, loads)
        )
        moves += sorted(_merge(group, raw), key=_sort_key)
    return Plan(source, target, tuple(moves))


def _sort_key(move: Move) -> tuple[int, int, int, int, int]:
    return (move.source, move.target, move.layers.first, move.units.first, move.tokens.first)


def _of_group(ranks: Sequence[Sequence[Shard]], group: str) -> list[_RankShard]:
    return [
        _RankShard(rank, shard)
        for rank, shards in enumerate(ranks)
        for shard in shards
        if shard.group == group
    ]


# ---------------------------------------------------------------- cells


def _cells(
    group: Group, sources: list[_RankShard], targets: list[_RankShard], role: str = "prefill"
) -> Iterator[_Cell]:
    """Return the cells that some target needs, with their sources and targets.

    The ranks that hold an interval of one axis are a bit mask over shards. Those of a cell are
    the intersection of its three masks.
    """
    shards = [held.shard for held in (*sources, *targets)]
    layer_cuts = _cuts(shard.layers for shard in shards)
    unit_cuts = _cuts(shard.units for shard in shards)
    classes = token_classes([shard.tokens for shard in shards], group.name)
    period = math.lcm(*(tokens.pattern.period for tokens in classes))
    _check_num_cells(group, len(layer_cuts) * len(unit_cuts) * len(classes))
    axes = [
        (
            _interval_masks(side, layer_cuts, lambda h: h.layers),
            _interval_masks(side, unit_cuts, lambda h: h.units),
            _class_masks(side, classes),
        )
        for side in (sources, targets)
    ]
    (s_layers, s_units, s_tokens), (t_layers, t_units, t_tokens) = axes
    for i, layer_span in enumerate(_intervals(layer_cuts)):
        layers = group.layers_in(layer_span)
        if not layers:
            continue
        for j, units in enumerate(_intervals(unit_cuts)):
            for k, tokens in enumerate(classes):
                wanted = t_layers[i] & t_units[j] & t_tokens[k]
                if not wanted:
                    continue
                held = s_layers[i] & s_units[j] & s_tokens[k]
                if not held:
                    raise _incomplete(group, layers, units, tokens, role)
                weight = tokens.pattern.density * (period // tokens.pattern.period)
                ends = _pick(sources, held), _pick(targets, wanted)
                yield _Cell(layers, units, tokens, weight, *ends)


def _cuts(spans: Iterable[Span]) -> list[int]:
    return sorted({edge for span in spans for edge in (span.first, span.end)})


def _intervals(cuts: list[int]) -> Iterator[Span]:
    return (Span(first, end) for first, end in itertools.pairwise(cuts))


def _interval_masks(
    side: list[_RankShard], cuts: list[int], axis: Callable[[Shard], Span]
) -> list[int]:
    """Return for each interval between cuts the bits of the shards that contain it."""
    masks = [0] * max(0, len(cuts) - 1)
    for bit, held in enumerate(side):
        span = axis(held.shard)
        for index in range(bisect_left(cuts, span.first), bisect_left(cuts, span.end)):
            masks[index] |= 1 << bit
    return masks


def _class_masks(side: list[_RankShard], classes: list[Tokens]) -> list[int]:
    """Return for each token class the bits of the shards that contain it."""
    # Many ranks hold the same token set, so only distinct sets are compared with each class.
    masks: dict[Tokens, int] = {}
    for bit, held in enumerate(side):
        masks[held.shard.tokens] = masks.get(held.shard.tokens, 0) | 1 << bit
    # A class never crosses the edge of a shard, so its first token decides for all.
    return [
        functools.reduce(or_, (mask for held, mask in masks.items() if tokens.first in held), 0)
        for tokens in classes
    ]


def _pick(side: list[_RankShard], mask: int) -> list[_RankShard]:
    picked = []
    while mask:
        low = mask & -mask
        picked.append(side[low.bit_length() - 1])
        mask ^= low
    return picked


# ---------------------------------------------------------------- sharing


def _share(group: str, cell: _Cell, loads: Counter[int]) -> Iterator[Move]:
    """Return the moves of a cell: the line of the targets' demands, cut into parts for the sources.

    ``loads`` is what each source sends of the group so far. It is updated.
    """
    num_layers = len(cell.layers)
    begin = 0
    for held, share in zip(cell.sources, _shares(cell, loads), strict=True):
        end = begin + share
        loads[held.rank] += share * len(cell.units) * cell.weight
        while begin < end:
            which, offset = divmod(begin, num_layers)
            stop = min(end, (which + 1) * num_layers)
            layers = cell.layers[offset : offset + stop - begin]
            yield _move(group, cell, held, cell.targets[which], layers)
            begin = stop


def _shares(cell: _Cell, loads: Counter[int]) -> list[int]:
    """Return how many layers of the line each source gets."""
    sources = range(len(cell.sources))
    base, extra = divmod(len(cell.targets) * len(cell.layers), len(sources))
    ranks = [held.rank for held in cell.sources]
    lightest = sorted(sources, key=lambda i: (loads[ranks[i]], ranks[i]))[:extra] if extra else []
    shares = [base] * len(sources)
    for index in lightest:
        shares[index] += 1
    return shares


def _move(
    group: str, cell: _Cell, source: _RankShard, target: _RankShard, layers: tuple[int, ...]
) -> Move:
    return Move(
        group=group,
        source=source.rank,
        target=target.rank,
        layers=Span(layers[0], layers[-1] + 1),
        units=cell.units,
        source_unit=cell.units.first - source.shard.units.first,
        target_unit=cell.units.first - target.shard.units.first,
        tokens=cell.tokens,
    )


# ---------------------------------------------------------------- merging


def _merge(group: Group, moves: Iterable[Move]) -> list[Move]:
    """Join moves of one pair that were cut at the boundaries of other ranks."""
    by_units = _join(
        moves,
        same=lambda m: (m.source, m.target, m.layers, m.tokens, m.target_unit - m.units.first),
        along=lambda m: m.units,
        joined=lambda a, b: replace(a, units=Span(a.units.first, b.units.end)),
        touching=lambda a, b: a.units.end == b.units.first,
    )
    return _join(
        by_units,
        same=lambda m: (m.source, m.target, m.units, m.tokens, m.source_unit, m.target_unit),
        along=lambda m: m.layers,
        joined=lambda a, b: replace(a, layers=Span(a.layers.first, b.layers.end)),
        touching=lambda a, b: not group.layers_in(Span(a.layers.end, b.layers.first)),
    )


def _join(
    moves: Iterable[Move],
    *,
    same: Callable[[Move], object],
    along: Callable[[Move], Span],
    joined: Callable[[Move, Move], Move],
    touching: Callable[[Move, Move], bool],
) -> list[Move]:
    """Join moves that touch along one axis and agree in everything else."""
    runs: dict[object, list[Move]] = {}
    for move in moves:
        runs.setdefault(same(move), []).append(move)
    result = []
    for run in runs.values():
        run.sort(key=along)
        current = run[0]
        for move in run[1:]:
            if touching(current, move):
                current = joined(current, move)
            else:
                result.append(current)
                current = move
        result.append(current)
    return result


# ---------------------------------------------------------------- refusals


def _check_complete(group: Group, targets: list[_RankShard]) -> None:
    """Refuse a target side that lacks part of the cache.

    The targets are taken as sources here, with a single target that needs the whole model.
    """
    tokens = Tokens(group.tokens_per_entry - 1, None, group.entries)
    model = Shard(group.name, Span(0, group.layers[-1] + 1), Span(0, group.units), tokens)
    for _ in _cells(group, targets, [_RankShard(0, model)], role="decode"):
        pass


def _check_num_cells(group: Group, num_cells: int) -> None:
    """Refuse a group that would take minutes to plan."""
    if num_cells > MAX_CELLS:
        raise Refused.because(
            ReasonCode.TOO_LARGE,
            f"group {group.name!r} would have {num_cells} cells (limit {MAX_CELLS}); "
            f"use sizes that divide each other, or fewer ranks",
        )


def _incomplete(
    group: Group, layers: tuple[int, ...], units: Span, tokens: Tokens, role: str
) -> Refused:
    return Refused.because(
        ReasonCode.INCOMPLETE,
        f"no {role} rank holds group {group.name!r} layers {layers[0]}..{layers[-1]} "
        f"units {units} tokens {tokens}; give a rank that holds it",
    )
