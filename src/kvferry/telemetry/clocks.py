"""Clocks of other processes: what is known of them from round trips. Pure.

Who wants to know asks at ``asked``; the other hears it at ``heard`` by its own clock and
answers at ``said``; the answer is here at ``answered``. The question was on its way before
``heard`` and the answer after ``said``, so the other's clock is ahead of ours by at most
``heard - asked`` and at least ``said - answered``. The middle of that is the estimate, and
half of its width the bound of its error, which grows with age as the clocks drift apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

# How fast two clocks may drift apart: quartz is within 100 parts in a million.
DRIFT = 1e-4


class Offset(msgspec.Struct, frozen=True, array_like=True):
    """Another clock is ahead of ours by ``seconds``, give or take ``error_s``, at ``at``."""

    seconds: float
    error_s: float
    at: float = 0.0

    def aged(self, now: float) -> Offset:
        """The same, as sure as it is by now."""
        return Offset(self.seconds, self.error_s + DRIFT * max(0.0, now - self.at), now)


def offset_of(asked: float, heard: float, said: float, answered: float) -> Offset:
    """What one round trip tells. Raises ``ValueError`` if it can't have been one."""
    if answered < asked or said < heard:
        raise ValueError("an answer does not come before its question")
    most, least = heard - asked, said - answered
    if most < least:
        raise ValueError("the other side held the question for longer than it was away")
    return Offset((most + least) / 2, (most - least) / 2, answered)


def better(known: Offset | None, new: Offset) -> Offset:
    """Whichever is the more certain at the time of the new one."""
    if known is None or new.error_s <= known.aged(new.at).error_s:
        return new
    return known


class _Way(NamedTuple):
    error_s: float
    seconds: float
    endpoint: str


def aligned(reference: str, offsets: Mapping[tuple[str, str], Offset]) -> dict[str, Offset]:
    """How far every clock that can be reached is ahead of the reference's.

    ``offsets[a, b]`` is how far b's clock is ahead of a's, as a has measured it. Errors add up
    along the way, and the way with the least is taken.
    """
    ways = _ways(offsets)
    found: dict[str, Offset] = {}
    waiting = [_Way(0.0, 0.0, reference)]
    while waiting:
        error_s, seconds, endpoint = heapq.heappop(waiting)
        if endpoint in found:
            continue
        found[endpoint] = Offset(seconds, error_s)
        for other, step in ways.get(endpoint, ()):
            if other not in found:
                heapq.heappush(waiting, _Way(error_s + step.error_s, seconds + step.seconds, other))
    return found


def _ways(
    offsets: Mapping[tuple[str, str], Offset],
) -> dict[str, list[tuple[str, Offset]]]:
    """Every measurement, both ways round."""
    ways: dict[str, list[tuple[str, Offset]]] = {}
    for (here, there), offset in offsets.items():
        back = Offset(-offset.seconds, offset.error_s, offset.at)
        ways.setdefault(here, []).append((there, offset))
        ways.setdefault(there, []).append((here, back))
    return ways


def best_reference(endpoints: Iterable[str], offsets: Mapping[tuple[str, str], Offset]) -> str:
    """The endpoint from which most others can be reached, with the least error in all."""

    def worth(endpoint: str) -> tuple[int, float]:
        found = aligned(endpoint, offsets)
        return -len(found), sum(offset.error_s for offset in found.values())

    return min(sorted(endpoints), key=worth)
