"""Offsets between the clocks of processes, measured by round trips. Pure.

A request leaves at ``asked``, arrives at ``heard`` by the peer's clock, is answered at ``said``
by the peer's clock, and the answer arrives at ``answered``. So the peer's clock is ahead by at
most ``heard - asked`` and by at least ``said - answered``. The middle is the estimate, half the
width is its error bound, and the bound grows with age because clocks drift.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec

# Bound of the drift between two quartz clocks: 100 parts per million.
DRIFT = 1e-4


class Offset(msgspec.Struct, frozen=True, array_like=True):
    """How far another clock is ahead: ``seconds`` ± ``error_s``, measured at ``at``."""

    seconds: float
    error_s: float
    at: float = 0.0

    def aged(self, now: float) -> Offset:
        """Return the same offset with the error bound that holds now."""
        return Offset(self.seconds, self.error_s + DRIFT * max(0.0, now - self.at), now)


def offset_of(asked: float, heard: float, said: float, answered: float) -> Offset:
    """Return the offset that one round trip shows. Raise ``ValueError`` for impossible times."""
    if answered < asked or said < heard:
        raise ValueError("an answer cannot come before its request")
    most, least = heard - asked, said - answered
    if most < least:
        raise ValueError("the peer held the request longer than the round trip took")
    return Offset((most + least) / 2, (most - least) / 2, answered)


def better(known: Offset | None, new: Offset) -> Offset:
    """Return the offset with the smaller error bound at the time of the new one."""
    if known is None or new.error_s <= known.aged(new.at).error_s:
        return new
    return known


def aligned(reference: str, offsets: Mapping[tuple[str, str], Offset]) -> dict[str, Offset]:
    """Return how far each clock is ahead of the reference's, for all that measurements connect.

    ``offsets[a, b]`` is how far b's clock is ahead of a's. Errors add up along a path; the path
    with the smallest sum is used (Dijkstra's algorithm).
    """
    edges: dict[str, list[tuple[str, float, float]]] = {}
    for (here, there), offset in offsets.items():
        edges.setdefault(here, []).append((there, offset.seconds, offset.error_s))
        edges.setdefault(there, []).append((here, -offset.seconds, offset.error_s))
    found: dict[str, Offset] = {}
    queue = [(0.0, 0.0, reference)]
    while queue:
        error_s, seconds, here = heapq.heappop(queue)
        if here not in found:
            found[here] = Offset(seconds, error_s)
            for there, more_s, more_error_s in edges.get(here, ()):
                heapq.heappush(queue, (error_s + more_error_s, seconds + more_s, there))
    return found
