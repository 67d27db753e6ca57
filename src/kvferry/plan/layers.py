"""How many layers to push at a time, from what a layer takes to compute and to send. Pure.

A chunk that is pushed whole leaves when its last layer is computed, and all of it is left to
send then. Pushed by groups of layers, it leaves while the layers above are computed, and only
the last group is left, if sending keeps up. Every push costs something of its own, so groups
that are too small take longer than they save.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.layout.intervals import SpanSet
from kvferry.plan.choose import BlockShape, choose
from kvferry.plan.cost import PUSH_CALL_S, PUSH_WRITE_S, LinkCost
from kvferry.plan.estimate import Estimate, MoveEstimate
from kvferry.plan.units import human_seconds

# What must be won before it is worth being less simple.
LEAST_GAIN, LEAST_GAIN_S = 0.1, 100e-6


class LayersPerPush(NamedTuple):
    """How many layers to push at a time, what is then left to send after the last, and why."""

    layers: int
    left_s: float
    whole_s: float
    reason: str


def layers_per_push(
    *,
    num_layers: int,
    layer_s: float,
    layer_bytes: int,
    layer_pieces: int = 1,
    link_cost: LinkCost,
    call_s: float = PUSH_CALL_S,
    write_s: float = PUSH_WRITE_S,
) -> LayersPerPush:
    """The size of a group that leaves the least to do after the last layer.

    ``layer_s`` is how long one layer of a chunk takes to compute, ``layer_bytes`` what a rank
    then has to send of it and ``layer_pieces`` the contiguous pieces that this falls into.
    ``num_layers``, which may be those of one pipeline stage, means: push the chunk whole.
    """
    if num_layers < 1 or layer_bytes < 0 or layer_pieces < 0:
        raise InputError("a chunk has at least one layer, of 0 bytes and 0 pieces or more")
    if not all(0 <= seconds < math.inf for seconds in (layer_s, call_s, write_s)):
        raise InputError("the times of a layer and of a push are 0 or more, and finite")

    def push_s(layers: int) -> float:
        shape = BlockShape(layers * layer_bytes, layers * layer_pieces, layers * layer_pieces, True)
        return write_s + choose(shape, link_cost).predicted_s

    def left_s(layers: int) -> float:
        """After the last layer: the last group, or all that sending is behind by then."""
        pushes = -(-num_layers // layers)
        sent_s = layers * layer_s + (num_layers / layers) * push_s(layers)
        return max(push_s(layers), sent_s - num_layers * layer_s) + pushes * call_s

    whole = left_s(num_layers)
    best = min(range(num_layers, 0, -1), key=left_s)
    gain = whole - left_s(best)
    if best == num_layers or gain < max(LEAST_GAIN * whole, LEAST_GAIN_S):
        reason = _why_whole(num_layers * layer_s, whole, push_s(1), layer_s)
        return LayersPerPush(num_layers, whole, whole, reason)
    keeps_up = "sending keeps up" if push_s(best) <= best * layer_s else "sending is the slower"
    left, before = human_seconds(left_s(best)), human_seconds(whole)
    reason = f"{keeps_up}: {left} are left after the last layer instead of {before}"
    return LayersPerPush(best, left_s(best), whole, reason)


def layers_for(costs: Estimate, layer_s: float) -> LayersPerPush:
    """The same for a request that was estimated, at the source that has the most to send."""
    by_source: dict[int, list[MoveEstimate]] = {}
    for one in costs.moves:
        by_source.setdefault(one.move.source, []).append(one)
    if not by_source:
        return LayersPerPush(1, 0.0, 0.0, "nothing travels")
    slowest = max(by_source.values(), key=lambda mine: sum(m.choice.predicted_s for m in mine))
    layers = SpanSet()
    for one in slowest:
        layers.add(one.move.layers)
    num_layers = sum(map(len, layers.spans))
    pieces = sum(m.shape.runs if m.shape.contiguous else m.shape.slices for m in slowest)
    return layers_per_push(
        num_layers=num_layers,
        layer_s=layer_s,
        layer_bytes=-(-sum(m.shape.num_bytes for m in slowest) // num_layers),
        layer_pieces=-(-pieces // num_layers),
        link_cost=costs.link_cost,
    )


def _why_whole(computed_s: float, whole_s: float, push_s: float, layer_s: float) -> str:
    before = human_seconds(whole_s)
    if computed_s <= 0.25 * whole_s:
        took = human_seconds(computed_s)
        return f"sending takes {before} and computing {took}, so there is little to hide it behind"
    if push_s > layer_s:
        return (
            f"a push of one layer takes {human_seconds(push_s)}, longer than computing it, and the "
            f"whole chunk only {before}"
        )
    return f"the whole chunk takes only {before}, so there is little to win"
