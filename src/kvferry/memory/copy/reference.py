"""The plain copy that every fast one is compared with: one piece at a time.

Slow on purpose. It reads the descriptors as the definition of what must move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Descriptors

Region = NDArray[np.uint8]


def copy_pieces(pieces: Descriptors, sources: Sequence[Region], targets: Sequence[Region]) -> None:
    """Copy every piece from its source region into its target region."""
    for source, at, target, to, length in zip(*(c.tolist() for c in pieces), strict=True):
        targets[target][to : to + length] = sources[source][at : at + length]
