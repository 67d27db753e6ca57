"""The difference of two ways that were measured in alternation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def shown_difference(own: Sequence[float], peer: Sequence[float]) -> str:
    """Return the median of paired differences in ms, with the 95 % confidence interval of it.

    The bounds are order statistics, which assume nothing of the distribution.
    """
    pairs = sorted(a - b for a, b in zip(own, peer, strict=True))
    outside = max(0, math.floor(len(pairs) / 2 - 0.98 * math.sqrt(len(pairs))))
    low, high = pairs[outside], pairs[-1 - outside]
    return f"{statistics.median(pairs):+.2f} ms ({low:+.2f} to {high:+.2f})"
