"""Faults, and how likely each is. A seed draws a few kinds and leaves the others out.

Leaving kinds out matters: a world in which everything breaks at once hides the
bugs that need most things to work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities per message or write, and how many of the rarer events."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    lose_note: float = 0.0
    duplicate_note: float = 0.0
    busy: float = 0.0
    write_failed: float = 0.0
    write_unknown: float = 0.0
    slow_write: float = 0.0
    torn_write: float = 0.0
    cancel_source: float = 0.0
    cancel_target: float = 0.0
    short_deadline: float = 0.0
    slow_prefill: float = 0.0
    late_decode: float = 0.0
    one_sided: float = 0.0
    mixed_up: float = 0.0
    stalls: int = 0
    kills: int = 0
    cuts: int = 0
    foreign: int = 0
    replays: int = 0
    strangers: int = 0
    tight_pools: int = 0
    leaves: int = 0
    unreached: float = 0.0
    late_choice: float = 0.0

    @staticmethod
    def draw(rng: random.Random) -> Faults:
        """A few kinds of fault, each with a strength."""
        chosen: dict[str, float] = {}
        for one in fields(Faults):
            if rng.random() < 0.3:
                is_count = one.type == "int"
                chosen[one.name] = rng.randint(1, 2) if is_count else rng.choice([0.03, 0.1, 0.3])
        return Faults(**chosen)  # type: ignore[arg-type]
