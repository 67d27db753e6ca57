"""How many layers to push at a time, from the time to compute and to send a layer.

A chunk that is pushed whole can only be sent once its last layer is computed. Pushed by groups of
layers, it is sent while later layers are computed, and only the last group remains at the end, if
sending keeps up. Every push has a fixed cost, so very small groups cost more than they save.
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

# Push whole chunks unless groups of layers save this share of the time, and this many seconds.
MIN_GAIN, MIN_GAIN_S = 0.1, 100e-6


class LayersPerPush(NamedTuple):
    """How many layers to push at a time, and why.

    ``left_s`` is the predicted time from the last layer to the end of the transfer, ``whole_s``
    the same if the chunk is pushed whole.
    """

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
    """Return the number of layers per push that leaves the least to send after the last layer.

    ``num_layers`` are the layers of the rank's pipeline stage; as the result it means to push the
    chunk whole. ``layer_s`` is the time to compute one layer of a chunk, ``layer_bytes`` what a
    rank sends of it, and ``layer_pieces`` the number of contiguous pieces of that.
    """
    if num_layers < 1 or layer_bytes < 0 or layer_pieces < 0:
        raise InputError("num_layers must be 1 or more, layer_bytes and layer_pieces 0 or more")
    if not all(0 <= seconds < math.inf for seconds in (layer_s, call_s, write_s)):
        raise InputError("layer_s, call_s and write_s must be 0 or more and finite")

    def push_s(layers: int) -> float:
        shape = BlockShape(layers * layer_bytes, layers * layer_pieces, layers * layer_pieces, True)
        return write_s + choose(shape, link_cost).predicted_s

    def left_s(layers: int) -> float:
        """Time to send the last group, or the whole backlog if sending is slower."""
        pushes = -(-num_layers // layers)
        sent_s = layers * layer_s + (num_layers / layers) * push_s(layers)
        return max(push_s(layers), sent_s - num_layers * layer_s) + pushes * call_s

    whole = left_s(num_layers)
    best = min(range(num_layers, 0, -1), key=left_s)
    gain = whole - left_s(best)
    if best == num_layers or gain < max(MIN_GAIN * whole, MIN_GAIN_S):
        reason = _why_whole(num_layers * layer_s, whole, push_s(1), layer_s)
        return LayersPerPush(num_layers, whole, whole, reason)
    keeps_up = (
        "sending keeps up" if push_s(best) <= best * layer_s else "sending is slower than computing"
    )
    left, before = human_seconds(left_s(best)), human_seconds(whole)
    reason = f"{keeps_up}: {left} are left after the last layer instead of {before}"
    return LayersPerPush(best, left_s(best), whole, reason)


def layers_for(costs: Estimate, layer_s: float) -> LayersPerPush:
    """Return ``layers_per_push`` for an estimated request, at the source with the most to send."""
    by_source: dict[int, list[MoveEstimate]] = {}
    for one in costs.moves:
        by_source.setdefault(one.move.source, []).append(one)
    if not by_source:
        return LayersPerPush(1, 0.0, 0.0, "there is nothing to send")
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
